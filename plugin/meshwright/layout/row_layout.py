"""Which rows of a full tensor each rank of an axis holds, and the arithmetic of the parts that follow.

The same description is used for slicing, for gathering back, for counting each element once in a norm and for
summing the gradients of rows that several ranks hold. "Row" means an index of the sharded dim.

A part maps positions in some flat storage (a rank's shard, a slice of it under ZeRO, a piece of a file) to positions in
the flattened one-device tensor. Both sides are strided, so that a shard along any dim is one block per span of rows,
however many rows the tensor has.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Span = tuple[int, int]  # start and stop in the full tensor


@dataclass(frozen=True)
class RowLayout:
    """For each rank, the spans of rows along ``dim`` that its local shard concatenates, in order.

    Several ranks may hold the same row (replicated key/value heads). If a rank holds fewer rows than the
    other ranks (the end of an uneven vocabulary), its shard ends in padding rows of zeros.

    Args:
        dim: the sharded dim.
        size: the number of rows of the full tensor.
        spans: the spans of each rank.

    Example:
        A fused query-key-value matrix of 4 + 2 + 2 rows on two ranks:

        >>> layout = RowLayout(dim=0, size=8, spans=(((0, 2), (4, 5), (6, 7)), ((2, 4), (5, 6), (7, 8))))
        >>> layout.take(torch.arange(8), rank=1).tolist()
        [2, 3, 5, 7]
    """

    dim: int
    size: int
    spans: tuple[tuple[Span, ...], ...]

    @staticmethod
    def replicated(size: int, ranks: int, dim: int = 0) -> RowLayout:
        """Return a layout in which every rank holds every row."""
        return RowLayout(dim, size, (((0, size),),) * ranks)

    @staticmethod
    def even(size: int, ranks: int, dim: int = 0, *, parts: Sequence[int] | None = None) -> RowLayout:
        """Return a layout of equal contiguous pieces; with ``parts``, each rank has an equal piece of every part."""
        starts, spans = 0, [[] for _ in range(ranks)]  # type: ignore[var-annotated]
        for part in parts or (size,):
            assert part % ranks == 0
            step = part // ranks
            for rank in range(ranks):
                spans[rank].append((starts + rank * step, starts + (rank + 1) * step))
            starts += part
        assert starts == size
        return RowLayout(dim, size, tuple(tuple(s) for s in spans))

    @staticmethod
    def padded(size: int, ranks: int, dim: int = 0) -> RowLayout:
        """Return a layout of contiguous pieces of ceil(size / ranks) rows; the last ranks may have fewer or none."""
        step = -(-size // ranks)
        return RowLayout(dim, size, tuple(((min(r * step, size), min((r + 1) * step, size)),) for r in range(ranks)))

    @staticmethod
    @functools.lru_cache(maxsize=2**11)  # each save asks for those of all parameters, while training waits
    def stretches(start: int, size: int, length: int, ranks: int) -> RowLayout:
        """Return which elements of ``flat[start : start + size]`` are in each rank's ``length``-element slice."""
        borders = [min(max(rank * length - start, 0), size) for rank in range(ranks + 1)]
        return RowLayout(0, size, tuple((span,) for span in pairwise(borders)))

    # Computed once: these run for every gradient of every step.
    @functools.cached_property
    def is_replicated(self) -> bool:
        """Whether every rank holds every row once, in order."""
        return all(
            [*(start for start, _ in spans), self.size] == [0, *(stop for _, stop in spans)] for spans in self.spans
        )

    @functools.cached_property
    def local_size(self) -> int:
        """The number of rows of every rank's shard, padding included."""
        return max(self.real_rows(rank) for rank in range(len(self.spans)))

    def real_rows(self, rank: int) -> int:
        """Return the number of rows of a rank's shard without padding."""
        return sum(stop - start for start, stop in self.spans[rank])

    def take(self, full: Tensor, rank: int) -> Tensor:
        """Return a contiguous copy of a rank's shard of ``full``."""
        pieces = [full.narrow(self.dim, start, stop - start) for start, stop in self.spans[rank]]
        missing = self.local_size - self.real_rows(rank)
        if missing:
            shape = list(full.shape)
            shape[self.dim] = missing
            pieces.append(full.new_zeros(shape))
        return torch.cat(pieces, self.dim).contiguous()

    def pairs(self, full: Tensor, local: Tensor, rank: int) -> list[tuple[Tensor, Tensor]]:
        """Return views of a rank's rows in ``full``, each with the view of the same rows in its shard."""
        pairs, offset = [], 0
        for start, stop in self.spans[rank]:
            length = stop - start
            pairs.append((full.narrow(self.dim, start, length), local.narrow(self.dim, offset, length)))
            offset += length
        return pairs

    def holders(self) -> list[tuple[tuple[int, ...], list[Span]]]:
        """Return the spans that only the same ranks hold, with these ranks; each row that is held is in one span."""
        borders = sorted({border for spans in self.spans for span in spans for border in span})
        found: dict[tuple[int, ...], list[Span]] = {}
        for low, high in pairwise(borders):
            ranks = (r for r, spans in enumerate(self.spans) if any(a <= low and high <= b for a, b in spans))
            found.setdefault(tuple(ranks), []).append((low, high))
        found.pop((), None)
        return list(found.items())

    def copies(self, rank: int) -> list[tuple[int, int]]:
        """Return a rank's runs of rows as pairs: the length, and the number of copies of each row (padding: 1)."""
        everywhere = [span for spans in self.spans for span in spans]
        borders = sorted({border for span in everywhere for border in span})
        runs = []
        for start, stop in self.spans[rank]:
            inside = [border for border in borders if start <= border <= stop]
            for first, last in pairwise(inside):
                runs.append((last - first, sum(low <= first < high for low, high in everywhere)))
        if missing := self.local_size - self.real_rows(rank):
            runs.append((missing, 1))
        return runs

    @property
    def has_copies(self) -> bool:
        """Whether some row is held more than once."""
        return sum(self.real_rows(rank) for rank in range(len(self.spans))) > self.size


def expanded(runs: list[tuple[int, int]], like: Tensor) -> Tensor:
    """Return one value per row from runs of (rows, value), with the dtype and device of ``like``."""
    parts = [torch.full((rows,), value, dtype=like.dtype, device=like.device) for rows, value in runs]
    nothing = torch.empty(0, dtype=like.dtype, device=like.device)  # a tensor without elements has no runs
    return torch.cat([nothing, *parts])


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
        if local == whole == 0:
            return self
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
