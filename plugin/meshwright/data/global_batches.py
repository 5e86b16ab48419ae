"""Computes which samples form each global batch, and which of the batch's rows each rank takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from meshwright.mesh.axes import Axis


class Batch(NamedTuple):
    """A global batch of ``rows`` samples of the epoch, from sample ``start`` on."""

    start: int
    rows: int


@dataclass(frozen=True)
class EqualBatches:
    """Batches of equal size. Only the last batch may be smaller.

    Args:
        num_samples: the number of samples in the epoch.
        batch_size: the number of rows per batch.
        drop_last: whether to leave out a last batch that is not full.
    """

    num_samples: int
    batch_size: int
    drop_last: bool = False

    @property
    def most(self) -> int:
        """The number of rows of a full batch."""
        return self.batch_size

    def __len__(self) -> int:
        return (self.num_samples + (0 if self.drop_last else self.batch_size - 1)) // self.batch_size

    def after(self, samples: int) -> Iterator[Batch]:
        """Return the batches after the first ``samples`` samples."""
        last = self.num_samples - self.dropped(samples)
        return (Batch(start, min(self.batch_size, last - start)) for start in range(samples, last, self.batch_size))

    def least(self, samples: int) -> int:
        """Return the number of rows of the smallest batch after the first ``samples`` samples."""
        rest = self.num_samples - samples - self.dropped(samples)
        return rest % self.batch_size or self.batch_size

    def dropped(self, samples: int = 0) -> int:
        """Return the number of samples that are left out at the end, if the batches begin at sample ``samples``."""
        return (self.num_samples - samples) % self.batch_size if self.drop_last else 0


class ListedBatches:
    """Batches with the sizes that the user's batch sampler drew."""

    def __init__(self, sizes: Sequence[int]):
        self._sizes = sizes
        self._starts = list(accumulate(sizes, initial=0))
        self.most = 0  # no batch counts as full, since the sizes may differ

    def __len__(self) -> int:
        return len(self._sizes)

    def after(self, samples: int) -> Iterator[Batch]:
        """Return the batches after the first ``samples`` samples.

        Raises:
            ValueError: sample ``samples`` is inside a batch.
        """
        if samples not in self._starts:
            raise ValueError(f"sample {samples} is inside a batch of the batch sampler, whose batches cannot be cut")
        first = self._starts.index(samples)
        return (Batch(start, rows) for start, rows in zip(self._starts[first:], self._sizes[first:], strict=False))

    def least(self, samples: int) -> int:
        """Return the number of rows of the smallest batch after the first ``samples`` samples."""
        return min((batch.rows for batch in self.after(samples)), default=0)

    def dropped(self, samples: int = 0) -> int:
        return 0


class Share(NamedTuple):
    """One rank's rows of a batch, from row ``low`` to row ``high - 1``.

    Args:
        low, high: the first row, and the row after the last. A share has at least one row.
        counted: the number of the share's rows that count: all, or 0 if the batch has too few rows for all ranks.
        is_replicated: whether every rank has all rows of the batch.
    """

    low: int
    high: int
    counted: int
    is_replicated: bool = False


Sharing = Callable[[int, Axis], Share]


def even_share(rows: int, axis: Axis) -> Share:
    """Return a rank's share of a batch. A rank that would have no row gets a row that does not count.

    The sizes of shares differ by at most one row.

    Example:
        >>> [even_share(5, Axis("dp", size=2, rank=rank))[:3] for rank in (0, 1)]
        [(0, 2, 2), (2, 5, 3)]
    """
    low, high = axis.rank * rows // axis.size, (axis.rank + 1) * rows // axis.size
    if low == high:
        low = min(low, rows - 1)
        return Share(low, low + 1, 0)
    return Share(low, high, high - low)


def chunk_share(rows: int, axis: Axis) -> Share:
    """Return a rank's rows under DTensor's ``Shard(0)``, or all rows if some rank would have none.

    All ranks but the last have the same number of rows.

    Example:
        >>> [chunk_share(5, Axis("dp", size=2, rank=rank))[:2] for rank in (0, 1)]
        [(0, 3), (3, 5)]
    """
    most = -(-rows // axis.size)
    if most * (axis.size - 1) >= rows:
        return Share(0, rows, rows, is_replicated=True)
    low = axis.rank * most
    high = min(rows, low + most)
    return Share(low, high, high - low)


@dataclass(frozen=True)
class Portion:
    """The rows of a global batch that one rank has read.

    Args:
        batch: the collated rows.
        total: the number of rows of the global batch.
        held: the number of rows of ``batch``.
        counted: the number of rows of ``batch`` that count; 0 if its rows only keep the rank in step with the others.
        is_whole: whether ``batch`` has all rows of the global batch.
        samples: what ``batch`` was collated from, if the loader needs it to make lengths equal.
    """

    batch: object
    total: int
    held: int
    counted: int
    is_whole: bool = False
    samples: list[Any] | bytes | None = None

    @classmethod
    def of(cls, share: Share, batch: object, total: int, samples: list[Any] | bytes | None = None) -> Portion:
        """Return the portion for a share with the collated rows ``batch``."""
        held = share.high - share.low
        return cls(batch, total, held, share.counted, is_whole=held == total, samples=samples)

    @property
    def is_blank(self) -> bool:
        return self.counted == 0
