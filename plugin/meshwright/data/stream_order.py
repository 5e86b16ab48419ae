"""The order of a stream: which lane gives each row of a batch, and which rank takes it.

The next sample comes from the lane with the fewest samples taken, the lowest lane among equals: round robin over the
lanes that still have samples. Batches do not depend on which rank reads a lane, so they are the same on every mesh.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Lane:
    """What all ranks know about one lane.

    Args:
        taken: the number of samples that went into batches.
        known: the number of samples after these that its reader holds.
        ended: whether the lane ends after these.
        starts: for each shard read so far, its place in the lane and the number of the lane's samples before it.
    """

    taken: int = 0
    known: int = 0
    ended: bool = False
    starts: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    @property
    def is_dry(self) -> bool:
        """Whether all samples of the lane went into batches."""
        return self.ended and not self.known


def next_batches(lanes: Sequence[Lane], batch_size: int, limit: int) -> list[list[int]]:
    """Return the lane of each row of the next batches, as far as they are certain; ``lanes`` is not changed.

    All batches have ``batch_size`` rows, except the last of the stream. Near the end of a lane the result may be
    empty: the end is then known, and the caller asks again when the other lanes know of more samples.

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
    """Return the rows of a batch that each rank takes, in order: equal shares, with as many of its own as possible.

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
