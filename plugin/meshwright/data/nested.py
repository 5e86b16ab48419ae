"""Batches as nested dicts, lists and tuples with tensors in them."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.faults.memory_digest import bytes_digest, is_plain

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def fill(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return the same structure, of the same types, with ``function`` applied to everything but containers."""
    if isinstance(value, Mapping):
        return _like(value, {key: fill(item, function) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(fill(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(fill(item, function) for item in value)
    return function(value)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return the same structure with ``function`` applied to its tensors; other values stay as they are."""
    return fill(value, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def _like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return the items in a mapping of the same type, since users call methods of ``BatchEncoding`` and others."""
    if type(value) is dict:
        return items
    try:
        out: Any = copy.copy(value)
        out.update(items)
    except Exception:  # one that cannot be copied or changed
        return items
    return out


def is_batch(value: Any) -> bool:
    """Whether a collate function may return this value."""
    return isinstance(value, Tensor | Mapping | list | tuple)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield everything in a structure but containers, with the path to it."""
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from leaves(item, f"{name}.{key}".lstrip("."))
    else:
        yield name or "batch", value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Return the tensors of a structure."""
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor))


def to_device(value: Any, device: torch.device) -> Any:
    """Return the structure with its tensors on ``device``."""
    return map_tensors(value, lambda x: x.to(device, non_blocking=True))


def take_rows(x: Tensor, own: slice) -> Tensor:
    """Return some rows of a tensor, including a sparse one, which cannot be sliced.

    Raises:
        ValueError: the tensor has a layout whose rows cannot be taken.
    """
    if is_dense(x):
        return x[own]
    if x.is_nested or x.layout not in SPARSE[:3]:
        raise ValueError(
            f"a batch holds a {kind_of(x)} tensor, whose rows cannot be split over data-parallel ranks; return "
            "x.to_dense() from the collate function, or x.to_sparse_csr()"
        )
    rows = torch.arange(x.shape[0], device=x.device)[own]
    taken = x.to_sparse_coo().index_select(0, rows)
    result: Tensor = taken if x.layout is torch.sparse_coo else taken.to_sparse(layout=x.layout)
    return result


def is_dense(x: Tensor) -> bool:
    """Whether a tensor has rows in memory, so that it can be sliced."""
    return x.layout is torch.strided and not x.is_nested


def kind_of(x: Tensor) -> str:
    """Return how a tensor is stored, in one word."""
    return "nested" if x.is_nested else str(x.layout).removeprefix("torch.")


def digest(value: Any) -> int:
    """Return a number from 0 to 2**32 - 1 that structures with different contents share only by chance."""
    code = 0
    for name, leaf in leaves(value):
        what: Any = type(leaf).__name__
        if isinstance(leaf, Tensor):
            what = (leaf.dtype, None if leaf.is_nested else tuple(leaf.shape))
            for part in _stored(leaf):
                code = bytes_digest(part, code)
        elif isinstance(leaf, str | bytes | int | float | bool | None):
            what = leaf
        elif isinstance(leaf, np.ndarray) and leaf.dtype.hasobject:  # its bytes are pointers
            what = digest(leaf.tolist())
        elif hasattr(type(leaf), "tobytes"):  # another array, or an image
            code = zlib.crc32(leaf.tobytes(), code)
        code = zlib.crc32(repr((name, what)).encode(), code)
    return code


def _stored(x: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that hold a tensor's values; none for unknown kinds."""
    if is_plain(x):
        return (x,)
    if x.is_nested or x.layout not in SPARSE:
        return ()
    x = x.to_sparse_coo().coalesce()
    return x.indices(), x.values()


def signature(value: Any) -> str:
    """Return the tensors of a structure as text: their paths, dtypes and sizes beyond the first dim."""
    found = []
    for name, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            sizes = ["nested"] if leaf.is_nested else ["*", *map(str, leaf.shape[1:])][: leaf.ndim]
            found.append(f"{name}: {str(leaf.dtype).removeprefix('torch.')}[{', '.join(sizes)}]")
    return ", ".join(found)
