"""Arithmetic of the parts in which a tensor is held, saved and read, without processes.

A part maps positions in some flat storage (a rank's shard, a slice of it under ZeRO, a piece of a file) to positions in
the flattened one-device tensor. Both sides are strided, so that a shard along any dim is one block per span of rows,
however many rows the tensor has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor


@dataclass(frozen=True)
class StridedBlock:
    """``count`` runs of ``length`` elements: run i has the storage positions from ``local + i * local_stride`` on, and
    the one-device positions from ``whole + i * whole_stride`` on."""

    local: int
    whole: int
    length: int
    count: int = 1
    local_stride: int = 0
    whole_stride: int = 0

    @property
    def numel(self) -> int:
        return self.length * self.count

    def moved(self, local: int, whole: int) -> StridedBlock:
        """Return a block of the same form whose positions are larger by these numbers."""
        return StridedBlock(
            self.local + local, self.whole + whole, self.length, self.count, self.local_stride, self.whole_stride
        )

    def repeated(self, rows: int, local: int, whole: int) -> list[StridedBlock]:
        """Return the blocks of several rows of a shard that each have what this block has of the first.

        Args:
            rows: the number of rows.
            local: the number of elements of a row of the shard.
            whole: the number of elements of a row of the one-device tensor.
        """
        if self.count == 1:
            return [_plain(StridedBlock(self.local, self.whole, self.length, rows, local, whole))]
        if (self.count * self.local_stride, self.count * self.whole_stride) == (local, whole):
            count, strides = self.count * rows, (self.local_stride, self.whole_stride)
            return [StridedBlock(self.local, self.whole, self.length, count, *strides)]
        return [self.moved(row * local, row * whole) for row in range(rows)]

    def swapped(self) -> StridedBlock:
        """Return the block with both sides exchanged."""
        return StridedBlock(self.whole, self.local, self.length, self.count, self.whole_stride, self.local_stride)

    def runs(self, first: int, last: int) -> StridedBlock:
        """Return the runs from ``first`` up to ``last``."""
        local, whole = self.local + first * self.local_stride, self.whole + first * self.whole_stride
        return StridedBlock(local, whole, self.length, last - first, self.local_stride, self.whole_stride)

    def columns(self, first: int, last: int) -> StridedBlock:
        """Return the elements from ``first`` up to ``last`` of each run."""
        return StridedBlock(
            self.local + first, self.whole + first, last - first, self.count, self.local_stride, self.whole_stride
        )


def between(blocks: Iterable[StridedBlock], start: int, stop: int) -> list[StridedBlock]:
    """Return the elements at the storage positions from ``start`` up to ``stop``, which become positions from 0 on."""
    found = (part for block in blocks for part in _between(block, start, stop))
    return [block.moved(-start, 0) for block in found if block.numel]


def packed(blocks: Iterable[StridedBlock]) -> list[StridedBlock]:
    """Return blocks of the same elements whose storage is contiguous, in the order of the blocks."""
    blocks = [block for block in blocks if block.numel]
    starts = accumulate((block.numel for block in blocks), initial=0)
    return [
        _plain(StridedBlock(start, block.whole, block.length, block.count, block.length, block.whole_stride))
        for start, block in zip(starts, blocks, strict=False)
    ]


def overlap(here: Iterable[StridedBlock], there: Sequence[StridedBlock]) -> list[StridedBlock]:
    """Return the elements that two parts share, as blocks from the storage of ``there`` to the storage of ``here``.

    In the returned blocks, ``local`` is a position in the storage of ``here``, and ``whole`` is a position in the
    storage of ``there``.
    """
    return [block for mine in here for other in there for block in _shared(mine, other)]


def numel(blocks: Iterable[StridedBlock]) -> int:
    """Return the number of elements of a part."""
    return sum(block.numel for block in blocks)


def copy_blocks(target: Tensor, source: Tensor, blocks: Iterable[StridedBlock]) -> None:
    """Copy blocks whose ``local`` is a position in ``target``, and whose ``whole`` is one in ``source``.

    Both tensors are 1-d and contiguous.
    """
    for b in blocks:
        size = (b.count, b.length)
        to = target.as_strided(size, (b.local_stride, 1), target.storage_offset() + b.local)
        to.copy_(source.as_strided(size, (b.whole_stride, 1), source.storage_offset() + b.whole))


def _shared(mine: StridedBlock, other: StridedBlock) -> Iterator[StridedBlock]:
    if mine.count > 1 and other.count > 1 and not _are_aligned(mine, other):
        # The two parts belong to tensors with different row lengths. This is rare, so a loop over the runs is enough.
        for i in range(mine.count):
            yield from _shared(mine.runs(i, i + 1), other)
    elif mine.count == 1:
        yield from _in_runs(mine, other)
    elif other.count == 1:
        yield from (block.swapped() for block in _in_runs(other, mine))
    else:
        yield from _in_columns(mine, other)


def _are_aligned(a: StridedBlock, b: StridedBlock) -> bool:
    """Whether the runs of both are columns of the same rows, and stay inside the rows."""
    width = a.whole_stride
    return width == b.whole_stride and all(x.whole % width + x.length <= width for x in (a, b))


def _in_runs(run: StridedBlock, other: StridedBlock) -> Iterator[StridedBlock]:
    """The elements that a single run shares with a block."""
    for part in _between(other.swapped(), run.whole, run.whole + run.length):
        if part.numel:
            # ``part`` has one-device positions as its storage: relative to the run, they are positions in its storage.
            yield part.moved(run.local - run.whole, 0)


def _in_columns(mine: StridedBlock, other: StridedBlock) -> Iterator[StridedBlock]:
    width = mine.whole_stride
    row, other_row = mine.whole // width, other.whole // width
    first, last = max(row, other_row), min(row + mine.count, other_row + other.count)
    column, other_column = mine.whole % width, other.whole % width
    low, high = max(column, other_column), min(column + mine.length, other_column + other.length)
    if first < last and low < high:
        a = mine.runs(first - row, last - row).columns(low - column, high - column)
        b = other.runs(first - other_row, last - other_row).columns(low - other_column, high - other_column)
        yield StridedBlock(a.local, b.local, a.length, a.count, a.local_stride, b.local_stride)


def _between(block: StridedBlock, start: int, stop: int) -> Iterator[StridedBlock]:
    """The elements of a block at the storage positions from ``start`` up to ``stop``: at most three blocks."""
    if block.count == 1:
        low, high = max(start - block.local, 0), min(stop - block.local, block.length)
        if low < high:
            yield block.columns(low, high)
        return
    stride = block.local_stride
    first = max(0, (start - block.local - block.length) // stride + 1)  # the first run that ends after ``start``
    last = min(block.count, -(-(stop - block.local) // stride))  # after the last run that begins before ``stop``
    if first < last and block.local + first * stride < start:
        yield from _between(block.runs(first, first + 1), start, stop)
        first += 1
    is_cut = first < last and block.local + (last - 1) * stride + block.length > stop
    if first < last - is_cut:
        yield block.runs(first, last - is_cut)
    if is_cut:
        yield from _between(block.runs(last - 1, last), start, stop)


def _plain(block: StridedBlock) -> StridedBlock:
    """The block as a single run, if it is one."""
    if block.count > 1 and block.local_stride == block.whole_stride == block.length:
        return StridedBlock(block.local, block.whole, block.numel)
    return StridedBlock(block.local, block.whole, block.length) if block.count == 1 else block
