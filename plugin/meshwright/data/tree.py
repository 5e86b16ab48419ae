"""Batches as nested dicts, lists and tuples with tensors in them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same structure with ``function`` applied to its tensors; other values stay as they are."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, function) for item in value)
    return value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a structure."""
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf


def leaves(value: Any) -> Iterator[Any]:
    """Everything in a structure that is not a container."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def to_device(value: Any, device: torch.device) -> Any:
    """The structure with its tensors on ``device``."""
    return map_tensors(value, lambda x: x.to(device, non_blocking=True))


def digest(value: Any) -> int:
    """A number from 0 to 2**32 - 1 that two structures with other contents do not share, but by chance."""
    code = 0
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            code = zlib.crc32(repr((leaf.dtype, tuple(leaf.shape))).encode(), code)
            raw = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            code = zlib.crc32(raw.numpy().data, code)
        elif isinstance(leaf, str | bytes | int | float | bool | None):
            code = zlib.crc32(repr(leaf).encode(), code)
    return code


def signature(value: Any, name: str = "") -> str:
    """The tensors of a structure: where they are in it, their dtypes and their sizes beyond the first dim."""
    if isinstance(value, Tensor):
        sizes = ["*", *map(str, value.shape[1:])][: value.ndim]
        return f"{name or 'batch'}: {str(value.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
    items: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    inner = [signature(item, f"{name}.{key}".lstrip(".")) for key, item in items]
    return ", ".join(filter(None, inner))
