"""Describe which rows of a full tensor each rank of an axis holds.

The same description is used for slicing, for gathering back, for counting each element once in a norm and for
summing the gradients of rows that several ranks hold. "Row" means an index of the sharded dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
