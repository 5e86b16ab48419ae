"""Which samples make up each global batch, and which of its rows each rank takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from meshwright.parallel.collectives import Axis


class Batch(NamedTuple):
    """A global batch: ``rows`` samples of the epoch, from sample ``start`` on."""

    start: int
    rows: int


@dataclass(frozen=True)
class EqualBatches:
    """Batches of one size, but for the last.

    Args:
        num_samples: of the epoch.
        batch_size: rows of a batch.
        drop_last: leave out a last batch that is not full.
    """

    num_samples: int
    batch_size: int
    drop_last: bool = False

    @property
    def most(self) -> int:
        """Rows of a full batch."""
        return self.batch_size

    def __len__(self) -> int:
        return (self.num_samples + (0 if self.drop_last else self.batch_size - 1)) // self.batch_size

    def after(self, samples: int) -> Iterator[Batch]:
        """The batches that follow the first ``samples`` samples."""
        last = self.num_samples - self.dropped(samples)
        return (Batch(start, min(self.batch_size, last - start)) for start in range(samples, last, self.batch_size))

    def least(self, samples: int) -> int:
        """Rows of the smallest of them."""
        rest = self.num_samples - samples - self.dropped(samples)
        return rest % self.batch_size or self.batch_size

    def dropped(self, samples: int = 0) -> int:
        """How many samples are left out at the end, if batches begin after ``samples``."""
        return (self.num_samples - samples) % self.batch_size if self.drop_last else 0


class ListedBatches:
    """Batches of the sizes that the user's batch sampler drew."""

    def __init__(self, sizes: Sequence[int]):
        self._sizes = sizes
        self._starts = list(accumulate(sizes, initial=0))
        self.most = 0  # rows of a full batch: none is called so

    def __len__(self) -> int:
        return len(self._sizes)

    def after(self, samples: int) -> Iterator[Batch]:
        """The batches that follow the first ``samples`` samples.

        Raises:
            ValueError: a batch would be cut.
        """
        if samples not in self._starts:
            raise ValueError(f"sample {samples} is inside a batch of the batch sampler, whose batches cannot be cut")
        first = self._starts.index(samples)
        return (Batch(start, rows) for start, rows in zip(self._starts[first:], self._sizes[first:], strict=False))

    def least(self, samples: int) -> int:
        """Rows of the smallest of them."""
        return min((batch.rows for batch in self.after(samples)), default=0)

    def dropped(self, samples: int = 0) -> int:
        return 0


class Share(NamedTuple):
    """A rank's rows of a batch: ``low`` to ``high``.

    Args:
        low, high: never the same.
        counted: those that count: all of them, or none where the batch has too few for all ranks.
        is_replicated: every rank has all rows.
    """

    low: int
    high: int
    counted: int
    is_replicated: bool = False


Sharing = Callable[[int, Axis], Share]


def even_share(rows: int, axis: Axis) -> Share:
    """Shares that differ by one row at most; a rank that would have none gets a row that does not count.

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
    """The rows of DTensor's ``Shard(0)``: all ranks but the last have as many; all rows, if that left one with none.

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
    """What a rank has read of a global batch.

    Args:
        batch: the collated rows.
        total: rows of the global batch.
        held: rows of ``batch``.
        counted: those of them that count; none of a copy that only keeps the rank in step.
        is_whole: they are all rows of the global batch.
    """

    batch: Any
    total: int
    held: int
    counted: int
    is_whole: bool = False

    @classmethod
    def of(cls, share: Share, batch: Any, total: int) -> Portion:
        """A share of a batch that was read as one."""
        held = share.high - share.low
        return cls(batch, total, held, share.counted, is_whole=held == total)

    @property
    def is_blank(self) -> bool:
        return self.counted == 0
