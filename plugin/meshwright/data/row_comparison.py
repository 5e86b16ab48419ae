"""Compares a batch that was collated whole with the same rows collated in parts, such as those of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.data.collation import is_padded, same_values
from meshwright.data.nested import SPARSE, digest, is_dense


@dataclass
class RowComparison:
    """What the parts of a batch have shown about its entries, by name.

    Args:
        of_batch: what has rows whose values depend on the rows of other parts.
        of_rows: real numbers without rows that are computed from all rows.
        fixed: tensors and lists that are the same for any rows, though they have as many entries as the batch has rows.
    """

    of_batch: list[str] = field(default_factory=list)
    of_rows: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)


def compare(whole: object, parts: Sequence[object], sizes: Sequence[int]) -> RowComparison:
    """Compare a batch with its parts.

    Padding is no difference: the loader pads the ranks' rows to one length afterwards.

    Args:
        whole: what a collate function returned for all rows.
        parts: what it returned for the first ``sizes[0]`` rows, for the ``sizes[1]`` rows after these, and so on.
        sizes: the numbers of rows of the parts.

    Example:
        >>> rows = torch.tensor([1.0, 2.0, 3.0, 6.0])
        >>> compare(rows - rows.mean(), [rows[:2] - 1.5, rows[2:] - 4.5], [2, 2]).of_batch
        ['batch']
    """
    found = RowComparison()
    for name, x, of_parts in _paired(whole, list(parts), sizes, ""):
        _judge(name or "batch", x, of_parts, sizes, found)
    return found


def _paired(whole: Any, parts: list[Any], sizes: Sequence[int], name: str) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield each entry that all parts have, a list with a value for each row whole, with its name and its values."""
    if isinstance(whole, Mapping) and all(isinstance(part, Mapping) for part in parts):
        for key in whole:
            if all(key in part for part in parts):  # rows without images have none of their inputs
                yield from _paired(whole[key], [part[key] for part in parts], sizes, f"{name}.{key}".lstrip("."))
    elif isinstance(whole, list | tuple) and all(type(part) is type(whole) for part in parts):
        if all(len(part) == len(whole) for part in parts) and not _has_row_lists(whole, parts, sizes):
            for i, item in enumerate(whole):
                yield from _paired(item, [part[i] for part in parts], sizes, f"{name}.{i}".lstrip("."))
        else:
            yield name, whole, parts
    else:
        yield name, whole, parts


def _has_row_lists(whole: Sequence[Any], parts: Sequence[Sequence[Any]], sizes: Sequence[int]) -> bool:
    return len(whole) == sum(sizes) and [len(part) for part in parts] == list(sizes)


def _judge(name: str, whole: Any, parts: list[Any], sizes: Sequence[int], found: RowComparison) -> None:
    if isinstance(whole, list | tuple) and all(isinstance(part, list | tuple) for part in parts):
        if _has_row_lists(whole, parts, sizes) and not _are_same_rows(whole, parts, sizes):
            found.of_batch.append(name)
        return
    values = [_tensor(x) for x in (whole, *parts)]
    if any(x is None for x in values):
        return
    x, *pieces = [x for x in values if x is not None]
    if all(same_values(piece, x) for piece in pieces):
        if x.ndim and len(x) == sum(sizes):
            found.fixed.append(name)
    elif _are_rows(x, pieces, sizes):
        if not (_are_pieces(x, pieces) or _are_blocks(x, pieces, sizes)):
            found.of_batch.append(name)
    elif x.is_floating_point() and all(piece.shape == x.shape for piece in pieces) and not _is_total(x, pieces):
        found.of_rows.append(name)


def _are_same_rows(whole: Sequence[Any], parts: Sequence[Sequence[Any]], sizes: Sequence[int]) -> bool:
    ends = list(accumulate(sizes))
    return all(
        digest(list(whole[end - size : end])) == digest(list(part))
        for part, size, end in zip(parts, sizes, ends, strict=True)
    )


def _tensor(x: object) -> Tensor | None:
    """Return a value's numbers as a dense tensor; None for what has none, or whose form cannot be compared."""
    if isinstance(x, float):
        return torch.tensor(x, dtype=torch.float64)
    if isinstance(x, np.ndarray | np.generic):
        array = np.asarray(x)
        return torch.from_numpy(array.copy()) if array.dtype.kind in "fiu" and array.dtype.isnative else None
    if not isinstance(x, Tensor) or x.is_nested:
        return None
    return x if is_dense(x) else (x.to_dense() if x.layout in SPARSE else None)


def _are_rows(x: Tensor, pieces: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Return whether a tensor has rows, or blocks of them, along its first dim. A part may have lost that dim."""
    rows = sum(sizes)
    if not x.ndim or len(x) == 0 or len(x) % rows:
        return False
    blocks = len(x) // rows
    if all(piece.ndim == x.ndim for piece in pieces):
        return [len(piece) for piece in pieces] == [blocks * size for size in sizes]
    return blocks == 1


def _are_pieces(x: Tensor, pieces: Sequence[Tensor]) -> bool:
    """Return whether a tensor consists of the parts' tensors along some dim, but for padding in its other dims."""
    for dim in range(x.ndim if all(piece.ndim == x.ndim for piece in pieces) else 0):
        lengths = [piece.shape[dim] for piece in pieces]
        if sum(lengths) == x.shape[dim] and all(
            is_padded(own, piece) for own, piece in zip(x.split(lengths, dim), pieces, strict=True)
        ):
            return True
    return False


def _are_blocks(x: Tensor, pieces: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Return whether a tensor has blocks of rows, such as the chosen rows and then the rejected, as the parts do."""
    if any(piece.ndim != x.ndim for piece in pieces):
        return False
    blocks = x.unflatten(0, (-1, sum(sizes))).split(list(sizes), 1)
    return all(is_padded(own.flatten(0, 1), piece) for own, piece in zip(blocks, pieces, strict=True))


def _is_total(x: Tensor, pieces: Sequence[Tensor]) -> bool:
    """Return whether a number is a count, or an extreme, of the parts' numbers: each rank has that of its own rows."""
    stacked = torch.stack(list(pieces))
    return any(same_values(y, x) for y in (stacked.sum(0), stacked.amax(0), stacked.amin(0)))
