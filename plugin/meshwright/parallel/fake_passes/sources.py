"""Follow, in a pass without values, which tensors are computed from weights, and from the results of which layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

OUTSIDE = -1  # in place of the index of a layer
# Operations that read the form of a tensor alone.
_FORM_NAMES = """
    empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_empty_strided new_zeros new_ones
    new_full
"""
_OF_FORM = frozenset(_FORM_NAMES.split())


class Sources(TorchDispatchMode):
    """Knows of each tensor from which layers it was computed, or from weights that are ``OUTSIDE`` of layers.

    Beside the layers, the sources of a tensor may be named arguments. They are those of a tensor's memory, so that a
    view has them too, with or without a graph.

    Attributes:
        listeners: functions that are called with each operation of a pass and its arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        """Forget a pass."""
        self.listeners: list[Callable[[Any, tuple[Any, ...]], None]] = []
        self._of: dict[int, frozenset[int | str]] = {}
        self._kept: list[Any] = []  # so that no other memory gets the number

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap each call for a compiler that does not run here

    def layers(self, x: Tensor) -> frozenset[int]:
        """Return the indices of the layers that a tensor was computed from, without a further layer in between."""
        return frozenset(source for source in self._all(x) if isinstance(source, int))

    def names(self, x: Tensor) -> frozenset[str]:
        """Return the names of the arguments that a tensor was computed from, without a layer in between."""
        return frozenset(source for source in self._all(x) if isinstance(source, str))

    def set(self, x: Tensor, sources: Iterable[int | str]) -> None:
        """Set the sources of a tensor."""
        self._kept.append(storage := x.untyped_storage())
        self._of[storage._cdata] = frozenset(sources)

    def add(self, x: Tensor, source: int | str) -> None:
        """Add a source to those of a tensor."""
        self.set(x, self._all(x) | {source})

    def _all(self, x: Tensor) -> frozenset[int | str]:
        return self._of.get(x.untyped_storage()._cdata, frozenset())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for listener in self.listeners:
            listener(func, args)
        result = _of_likely_shape(func, args)
        result = func(*args, **(kwargs or {})) if result is None else result
        is_of_form, is_mutable = _traits(func)
        if is_of_form:
            return result
        given = [*_tensors(args), *_tensors((kwargs or {}).values())]
        if sources := frozenset().union(*map(self._all, given)):
            for x in (*_tensors((result,)), *(given[:1] if is_mutable else ())):
                self.set(x, sources | self._all(x))
        return result


@functools.cache
def _traits(func: Any) -> tuple[bool, bool]:
    """Return whether an operation reads the form of a tensor alone, and whether it writes into one."""
    return func._schema.name.rpartition("::")[2] in _OF_FORM, func._schema.is_mutable


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, which may be lists of tensors."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def _of_likely_shape(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the result of an operation whose shape depends on values, as it often is; None for other operations."""
    x: Any = args[0] if args else None
    if func is torch.ops.aten.nonzero.default:  # experts that get no tokens
        return x.new_empty(0, x.ndim, dtype=torch.int64)
    if func is torch.ops.aten.unique_consecutive.default:  # as many marks in each row
        return x.flatten()[:1], x.new_empty(0), x.new_empty(0)
    if func is torch.ops.aten.index.Tensor and (mask := args[1][0]) is not None and mask.dtype is torch.bool:
        return x.new_empty(mask.shape[0], *x.shape[mask.ndim :])  # one mark in each row, such as the end of a text
    return None
