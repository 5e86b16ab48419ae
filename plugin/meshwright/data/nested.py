"""Functions on batches, which are nested dicts, lists and tuples, and the bytes as which a worker sends them."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.containers import rebuilt
from meshwright.faults.memory_digest import bytes_digest, is_plain
from meshwright.mesh.packed_values import UnsupportedValue, pack, unpack
from meshwright.parallel.batch.schema import leaves as leaves
from meshwright.parallel.batch.schema import tensors_of as tensors_of

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def fill(value: object, function: Callable[[Any], Any]) -> Any:
    """Return a structure with containers of the same types, and ``function`` applied to every other value."""
    if isinstance(value, Mapping):
        return like(value, {key: fill(item, function) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return rebuilt(value, [fill(item, function) for item in value])
    return function(value)


def map_tensors(value: object, function: Callable[[Tensor], Any]) -> Any:
    """Return the same structure with ``function`` applied to its tensors; other values stay as they are."""
    return fill(value, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return the items in a mapping of the type of ``value``: users call methods of types such as ``BatchEncoding``."""
    if type(value) is dict:
        return items
    try:
        out: Any = copy.copy(value)
        out.update(items)
    except Exception:  # the mapping cannot be copied or changed
        return items
    return out


def is_batch(value: object) -> bool:
    """Return whether a collate function may return this value."""
    return isinstance(value, Tensor | Mapping | list | tuple)


def why_no_batch(value: object) -> str | None:
    """Return why a value is one sample of a language model, not a batch of them; None if nothing says so."""
    wrap = "wrap the samples: DataLoader(samples, batch_size=8)"
    if isinstance(value, str):
        return f"texts. Tokenize and {wrap}"
    given = value if isinstance(value, Mapping) else {}
    for name in ("input_ids", "decoder_input_ids"):
        ids = given.get(name)
        if isinstance(ids, Tensor) and ids.ndim == 1:
            return f"{name} has the shape {tuple(ids.shape)}, and a batch's would be (rows, {len(ids)}); {wrap}"
        if isinstance(ids, list | tuple) and ids and isinstance(ids[0], int):
            return f"{name} is a list of {len(ids)} numbers, and a batch's would be a tensor; {wrap}"
    return None


def to_device(value: object, device: torch.device) -> Any:
    """Return the structure with its tensors on ``device``."""
    return map_tensors(value, lambda x: x.to(device, non_blocking=True))


def take_rows(x: Tensor, own: slice | list[int]) -> Tensor:
    """Return the rows ``own`` of a tensor, which may be sparse (torch cannot slice sparse tensors).

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
    """Return whether a tensor is dense, so that its rows can be sliced."""
    return x.layout is torch.strided and not x.is_nested


def kind_of(x: Tensor) -> str:
    """Return the name of a tensor's layout, or "nested"."""
    return "nested" if x.is_nested else str(x.layout).removeprefix("torch.")


def digest(value: object) -> int:
    """Return a 32-bit digest of a structure's contents. Different contents have equal digests only by chance."""
    code = 0
    for name, leaf in leaves(value):
        what: object = type(leaf).__name__
        if isinstance(leaf, Tensor):
            what = (leaf.dtype, None if leaf.is_nested else tuple(leaf.shape))
            for part in _stored(leaf):
                code = bytes_digest(part, code)
        elif isinstance(leaf, str | bytes | int | float | bool | None):
            what = leaf
        elif isinstance(leaf, np.ndarray) and leaf.dtype.hasobject:  # the array's bytes are pointers
            what = digest(leaf.tolist())
        elif hasattr(type(leaf), "tobytes"):  # another array, or an image
            code = zlib.crc32(leaf.tobytes(), code)
        code = zlib.crc32(repr((name, what)).encode(), code)
    return code


def _stored(x: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that hold a tensor's values; an empty tuple for unsupported layouts."""
    if is_plain(x):
        return (x,)
    if x.is_nested or x.layout not in SPARSE:
        return ()
    x = x.to_sparse_coo().coalesce()
    return x.indices(), x.values()


def signature(value: object) -> str:
    """Return a text with the path, dtype and sizes beyond the first dim of each tensor in a structure."""
    found = []
    for name, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            sizes = ["nested"] if leaf.is_nested else ["*", *map(str, leaf.shape[1:])][: leaf.ndim]
            found.append(f"{name}: {str(leaf.dtype).removeprefix('torch.')}[{', '.join(sizes)}]")
    return ", ".join(found)


def sent(value: object) -> Any:
    """Return a value as bytes; one of a class that cannot be packed is left to the DataLoader, which pickles it."""
    try:
        return pack(value).numpy().tobytes()
    except UnsupportedValue:
        return value


def received(value: object) -> Any:
    """Return the value that a worker has sent."""
    return unpack(torch.from_numpy(np.frombuffer(bytearray(value), np.uint8))) if isinstance(value, bytes) else value
