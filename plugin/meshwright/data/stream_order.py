"""Computes the order of a stream: the lane that each row of a batch comes from, and the rank that takes the row.

The next sample comes from the lane from which the fewest samples were taken; of several such lanes, from the one with
the lowest number. This is a round robin over the lanes that still have samples. Batches do not depend on which rank
reads a lane, so they are the same on every mesh.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Lane:
    """The state of one lane, which all ranks know.

    Args:
        taken: the number of the lane's samples that are in batches so far.
        known: the number of further samples that the lane's reader has read.
        ended: whether the lane has no samples after the known ones.
        starts: for each shard opened so far, its index in the lane and the number of the lane's samples before it.
    """

    taken: int = 0
    known: int = 0
    ended: bool = False
    starts: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    @property
    def is_dry(self) -> bool:
        """Whether all samples of the lane are in batches."""
        return self.ended and not self.known


def next_batches(lanes: Sequence[Lane], batch_size: int, limit: int) -> list[list[int]]:
    """Return for each of the next batches the lane of each row, as far as the ``known`` samples determine it.

    Does not change ``lanes``. All batches have ``batch_size`` rows, except the last of the stream. Near the end of a
    lane the result may be empty. The caller then reads more samples of the other lanes and calls again.

    Args:
        lanes: all lanes.
        batch_size: the number of rows per batch.
        limit: the maximum number of batches to return.

    Example:
        >>> next_batches([Lane(known=1, ended=True), Lane(known=9), Lane(known=9)], batch_size=4, limit=2)
        [[0, 1, 2, 1], [2, 1, 2, 1]]
    """
    queue = [(lane.taken, number) for number, lane in enumerate(lanes) if not lane.is_dry]
    heapq.heapify(queue)
    known = [lane.known for lane in lanes]
    batches: list[list[int]] = []
    while queue and len(batches) < limit:
        batch: list[int] = []
        while queue and len(batch) < batch_size:
            taken, number = queue[0]
            if not known[number]:
                return batches
            known[number] -= 1
            batch.append(number)
            if known[number] or not lanes[number].ended:
                heapq.heapreplace(queue, (taken + 1, number))
            else:
                heapq.heappop(queue)
        batches.append(batch)
    return batches


def deal(owners: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the rows of a batch that each rank takes, in order.

    The sizes of shares differ by at most one row. A rank takes as many rows as possible that it has read itself.

    Args:
        owners: the rank that has read each row.
        ranks: the number of ranks.

    Example:
        >>> deal([0, 1, 0, 0], ranks=2)
        [[0, 2], [1, 3]]
    """
    sizes = [(rank + 1) * len(owners) // ranks - rank * len(owners) // ranks for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    spare = []
    for row, owner in enumerate(owners):
        if len(shares[owner]) < sizes[owner]:
            shares[owner].append(row)
        else:
            spare.append(row)
    moved = iter(spare)
    for share, size in zip(shares, sizes, strict=True):
        share.extend(next(moved) for _ in range(size - len(share)))
    return [sorted(share) for share in shares]
