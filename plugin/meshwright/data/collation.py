"""Collates a rank's rows with a row of another rank, so that the collate function pads them to that row's length.

What a collate function returns has rows if it also has this rank's rows when the function runs on these alone.
Everything else, such as packed tokens, is taken from what it returns for this rank's rows alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sized
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.containers import rebuilt
from meshwright.data.nested import is_dense, leaves, like

Collate = Callable[[list[Any]], Any]

_LAST_BITS = 16  # of the largest value


def row_sizes(batch: object, held: int) -> tuple[int, list[int]]:
    """Return a digest of which tensors of a batch of ``held`` rows have rows, and the sizes of their other dims."""
    found = [(name, x) for name, x in leaves(batch) if isinstance(x, Tensor) and _has_rows(x, held)]
    return zlib.crc32(repr([(name, x.ndim) for name, x in found]).encode()), [n for _, x in found for n in x.shape[1:]]


def _has_rows(x: Tensor, rows: int) -> bool:
    """Return whether a tensor has rows, or several blocks of them, such as the chosen rows and then the rejected."""
    return not x.is_nested and x.ndim > 1 and x.shape[0] > 0 and x.shape[0] % rows == 0


def longest(collate: Collate, samples: list[Any], sizes: list[int]) -> list[Any]:
    """Return a few of the samples that are collated to the same sizes as all of them."""
    ordered = sorted(samples, key=_weight, reverse=True)
    count = 1
    while count < len(ordered) and row_sizes(collate(ordered[:count]), count)[1] != sizes:
        count *= 2
    return ordered[:count]


def _weight(value: object) -> int:
    """Return the number of elements of a sample."""
    if isinstance(value, Mapping):
        return sum(map(_weight, value.values()))
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        return sum(map(_weight, value))
    if isinstance(value, Tensor | np.ndarray):
        return int(np.prod(value.shape))
    return len(value) if hasattr(value, "__len__") else 1


def padded(collate: Collate, samples: list[Any], alone: object, others: list[Any]) -> Any:
    """Return a batch with the padding that it has when it is collated together with other samples.

    Args:
        collate: the user's collate function.
        samples: the samples of the batch.
        alone: the batch: what the function returns for the samples.
        others: the other samples.

    Returns:
        The rows of ``samples`` in what the function returns for all samples; ``alone`` if these cannot be told from
        the others, because a row's values depend on the other rows; and None if nothing has rows.
    """
    whole = collate(samples + others)
    rows = _Rows(len(samples) + len(others), len(samples))
    pairs = list(_paired(whole, alone, rows))
    if any(w is _DIFFERENT for w, _ in pairs):
        return alone
    found = [(w, a, rows.of_tensor(w, a)) for w, a in pairs if isinstance(w, Tensor) and isinstance(a, Tensor)]
    taken = {id(w): (own, a) for w, a, own in found if own is not None}
    agree = [is_padded(own, a) for own, a in taken.values()]
    # If a function draws random numbers, the two runs differ, and must not be mixed.
    is_drawn = not all(agree) and any(agree) and len(taken) == sum(w.ndim > 0 for w, _, _ in found)
    if not taken:
        return None
    if not all(agree) and not (is_drawn and not _equal_batches(collate(samples + others), whole)):
        return alone
    return _joined(whole, alone, rows, {key: own for key, (own, _) in taken.items()})


def _equal_batches(one: object, other: object) -> bool:
    pairs = zip(leaves(one), leaves(other), strict=True)
    return all(same_values(x, y) for (_, x), (_, y) in pairs if isinstance(x, Tensor) and isinstance(y, Tensor))


class _Rows:
    """The first ``own`` rows of a batch of ``total`` rows, in values that a collate function returned."""

    def __init__(self, total: int, own: int):
        self.total, self.own = total, own

    def of_list(self, whole: Sized, alone: Sized) -> bool:
        """Return whether a list has one item per row, and ``alone`` is the same list of this rank's rows."""
        return len(whole) == self.total and len(alone) == self.own

    def of_tensor(self, whole: Tensor, alone: Tensor) -> Tensor | None:
        """Return this rank's rows of a tensor; None if it has no rows, such as one with the tokens of all rows."""
        if not (_has_rows(whole, self.total) and _has_rows(alone, self.own)) or whole.ndim != alone.ndim:
            return None
        blocks = len(whole) // self.total
        if len(alone) != blocks * self.own or not (is_dense(whole) and is_dense(alone)):
            return None
        return whole.reshape(blocks, self.total, *whole.shape[1:])[:, : self.own].flatten(0, 1)


_DIFFERENT = object()  # in place of a part that has another form in the batch of this rank's rows


def _paired(whole: object, alone: object, rows: _Rows) -> Iterator[tuple[Any, Any]]:
    """Yield the values at the same places of two collated batches that are neither containers nor lists of rows."""
    if isinstance(whole, Mapping) and isinstance(alone, Mapping) and whole.keys() == alone.keys():
        for key, value in whole.items():
            yield from _paired(value, alone[key], rows)
    elif isinstance(whole, list | tuple) and type(whole) is type(alone):
        if rows.of_list(whole, alone):
            return
        if len(whole) != len(alone):
            yield _DIFFERENT, None
            return
        for value, other in zip(whole, alone, strict=True):
            yield from _paired(value, other, rows)
    elif isinstance(whole, Mapping | list | tuple) or type(whole) is not type(alone):
        yield _DIFFERENT, None
    else:
        yield whole, alone


def _joined(whole: Any, alone: Any, rows: _Rows, taken: Mapping[int, Tensor]) -> Any:
    """Return this rank's rows of the tensors that have rows, and everything else as it is collated alone."""
    if isinstance(whole, Mapping):
        return like(whole, {key: _joined(value, alone[key], rows, taken) for key, value in whole.items()})
    if isinstance(whole, list | tuple):
        if rows.of_list(whole, alone):
            return alone
        return rebuilt(whole, [_joined(w, a, rows, taken) for w, a in zip(whole, alone, strict=True)])
    return taken.get(id(whole), alone)


def is_padded(own: Tensor, alone: Tensor) -> bool:
    """Return whether rows equal the same rows collated alone, but for padding at either end of each dim."""
    if not (is_dense(own) and is_dense(alone)) or own.dtype != alone.dtype or own.ndim != alone.ndim:
        return False
    sizes = list(zip(own.shape, alone.shape, strict=True))
    if any(most < size for most, size in sizes):
        return False
    ends = [{(0, size), (most - size, most)} for most, size in sizes]
    return any(same_values(own[tuple(slice(*end) for end in part)], alone) for part in product(*ends))


def same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape are equal, but for rounding and the places that are NaN in both."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other) or not one.is_floating_point():
        return torch.equal(one, other)
    # A function of more rows may run in wider vectors, whose last bits differ.
    most = other.nan_to_num(0.0, 0.0, 0.0).abs().max().double().item()
    return torch.allclose(one.double(), other.double(), 0.0, _LAST_BITS * torch.finfo(one.dtype).eps * most, True)
