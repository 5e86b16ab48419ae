"""The tensors and the mask among the arguments of a layer, wherever they are inside of tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from meshwright.containers import rebuilt
from meshwright.context.masks import ContextMask

Place = tuple[Any, ...]  # the keys that lead to a tensor inside a layer's (args, kwargs)


def mask_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ContextMask | None:
    """Return the mask of the sequence among the arguments of a layer."""
    masks = (x for x in (*args, *kwargs.values()) if isinstance(x, ContextMask))
    return next((x for x in masks if not x.is_for_all_queries or x.keys == x.length), None)


def tensors_in(value: object, place: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    """Yield the tensors inside tuples, lists and dicts, each with the keys that lead to it."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from tensors_in(item, (*place, index))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from tensors_in(item, (*place, name))


def map_tensors(change: Callable[[Tensor, Place], Any], value: object, place: Place = ()) -> Any:
    """Return ``value`` with ``change(tensor, keys that lead to it)`` for each tensor inside tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value, place)
    if isinstance(value, tuple | list):
        return rebuilt(value, [map_tensors(change, item, (*place, index)) for index, item in enumerate(value)])
    if type(value) is dict:
        return {name: map_tensors(change, item, (*place, name)) for name, item in value.items()}
    return value
