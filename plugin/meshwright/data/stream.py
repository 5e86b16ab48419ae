"""Reads a dataset in shards of unknown length, with every sample in one batch, in an order that is the same on any
mesh.

The shards are spread over a fixed number of lanes, and the stream takes a sample from each lane in turn. The order does
not depend on which ranks and workers read the lanes. A rank cannot know where the lanes of other ranks end. So every
few steps the ranks exchange how many samples they hold, and plan the next batches from these numbers. Samples move
between ranks only if the lanes cannot be divided evenly over the ranks, or some have ended.

The next sample comes from the lane from which the fewest samples were taken; of several such lanes, from the one with
the lowest number. This is a round robin over the lanes that still have samples. Batches do not depend on which rank
reads a lane, so they are the same on every mesh.
"""

from __future__ import annotations

import heapq
import math
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.data.readers.read_ahead import ReadAhead
from meshwright.data.shards import LaneReader, as_source, window_start
from meshwright.errors import CheckpointError, PeerFailedError
from meshwright.faults.interpose import own_collectives
from meshwright.faults.together import values_of_all
from meshwright.mesh.axes import Axis
from meshwright.mesh.packed_values import UnsupportedValue, pack
from meshwright.outside_files import anything, integer, is_same, listed, maybe, record, require, row, shown
from meshwright.plan.loader_options import LANES


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
    for index, owner in enumerate(owners):
        if len(shares[owner]) < sizes[owner]:
            shares[owner].append(index)
        else:
            spare.append(index)
    moved = iter(spare)
    for share, size in zip(shares, sizes, strict=True):
        share.extend(next(moved) for _ in range(size - len(share)))
    return [sorted(share) for share in shares]


VERSION = 1
PLAN_STEPS = 8
_FIELDS = {"version": integer(), "epoch": integer(0, 2**31), "samples": integer()}
# Of each lane: the samples taken, and of the open shard its index in the lane and the lane's samples before it.
_LANES = {"lanes": listed(maybe(row(integer(), integer(), integer())))}
BLANK = 0  # the row that a rank takes if a batch has too few rows for all ranks


@dataclass(frozen=True)
class StreamRows:
    """This rank's rows of one batch.

    Args:
        samples: the samples, at least one.
        is_blank: whether the batch has no row for this rank, so that the one sample in ``samples`` must not count.
        total: the number of the batch's rows over all ranks.
    """

    samples: list[Any]
    is_blank: bool
    total: int


class ShardedStream:
    """Iterates over this rank's rows of the global batches of a sharded dataset. Each ``iter(stream)`` reads one epoch.

    In an epoch every sample is in one batch, all ranks take the same number of steps, and batch k holds the same
    samples for any number of ranks and workers. All ranks of ``dp`` must iterate; ``state_dict`` does not communicate.

    Args:
        dataset: a list with one iterable (or function that returns an iterable) per shard, a Hugging Face iterable
            dataset, or a ``ShardedSource``.
        batch_size: the number of rows per global batch.
        dp: the axis along which ranks read different rows.
        shuffle: whether to shuffle the shards and, within windows, the samples, in a new order each epoch.
        buffer_size: the number of samples in the shuffled windows of all lanes.
        seed: the seed of the shuffling.
        lanes: the number of shards that are read at a time over all ranks. The order depends on this number, so a
            resumed run cannot change it. It should be a multiple of (number of ranks x workers per rank).
        drop_last: whether to leave out a last batch that is not full; ``dropped`` counts its samples.
        num_workers: the number of reading processes per rank.
        loader_options: further arguments of the DataLoader that runs the workers, such as ``prefetch_factor``.
        name: a name for the dataset, instead of its source's fingerprint.
        gather: a function that gathers a value from all ranks of ``dp``; by default over the process group.

    Raises:
        ValueError: a size below 1, or a dataset without shards.

    Example:
        >>> stream = ShardedStream([range(3), range(3, 5)], batch_size=4, dp=Axis("dp"))
        >>> [rows.samples for rows in stream]
        [[0, 3, 1, 4], [2]]
    """

    def __init__(
        self,
        dataset: object,
        *,
        batch_size: int,
        dp: Axis,
        shuffle: bool = False,
        buffer_size: int = 1000,
        seed: int = 0,
        lanes: int = LANES,
        drop_last: bool = False,
        num_workers: int = 0,
        loader_options: Mapping[str, Any] | None = None,
        name: str | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
    ):
        sizes = {"batch_size": batch_size, "buffer_size": buffer_size, "lanes": lanes}
        for size, value in sizes.items():
            if value < 1:
                raise ValueError(f"{size}={value} must be at least 1")
        self.source = as_source(dataset)
        self.batch_size, self.dp, self.drop_last = batch_size, dp, drop_last
        self.epoch = self.samples = self.dropped = 0
        self.failure: Exception | None = None  # the error of the dataset that ended reading on this rank
        self._num_lanes = min(lanes, self.source.num_shards)
        self._order: dict[str, Any] = {
            "num_shards": self.source.num_shards,
            "fingerprint": getattr(self.source, "fingerprint", "") if name is None else name,
            "lanes": self._num_lanes,
            "shuffle": shuffle,
            "window": math.ceil(buffer_size / self._num_lanes) if shuffle else 1,
            "seed": seed,
        }
        self._loader_options = {**(loader_options or {}), "num_workers": num_workers}
        self._gather = gather or (lambda value: gather_objects(value, dp))
        self._lanes = self._new_lanes()
        self._goes_on = False  # whether the next iteration resumes from a loaded state

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next ``iter`` reads, from its start unless a state of this epoch was loaded."""
        if epoch != self.epoch or not self._goes_on:
            self.epoch, self.samples, self._goes_on = epoch, 0, False
            self._lanes = self._new_lanes()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, as a small JSON dict that is the same on all ranks."""
        window = self._order["window"]
        lanes = []
        for lane in self._lanes:
            start = window_start(lane.taken, window)
            place, base = max(entry for entry in lane.starts if entry[1] <= start)
            lanes.append(None if lane.is_dry else [lane.taken, place, base])
        order = {**self._order, "lanes": lanes}
        return {"version": VERSION, "epoch": self.epoch, "samples": self.samples, **order}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check a state.

        Raises:
            CheckpointError: the state belongs to a stream with another order, or a field has a wrong type or range. The
                message says what differs.
        """
        if state.get("version") != VERSION:
            found = shown(state.get("version"))
            raise CheckpointError(f"the state has version {found}, but this stream reads version {VERSION}")
        require(
            dict(state), record({**_FIELDS, **dict.fromkeys(self._order, anything), **_LANES}), "the stream's state"
        )
        other = {**state, "lanes": len(state["lanes"])}
        for name, value in self._order.items():
            if not is_same(other[name], value):
                raise CheckpointError(
                    f"the state is of a stream with {name}={shown(other[name])}, but this one has {name}={value}, so "
                    "its samples come in another order; use the dataset and the arguments of the run that saved the "
                    "state"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next ``iter`` resume from a state, saved with any number of ranks and workers and any batch size.

        Raises:
            CheckpointError: see :meth:`check_state`.
        """
        self.check_state(state)
        self.epoch, self.samples, self._goes_on = state["epoch"], state["samples"], True
        self._lanes = [
            Lane(ended=True) if entry is None else Lane(entry[0], starts=[(entry[1], entry[2])])
            for entry in state["lanes"]
        ]

    def __iter__(self) -> Iterator[StreamRows]:
        if not self._goes_on:
            self._lanes, self.samples = self._new_lanes(), 0
        self._goes_on = False
        self.dropped = 0
        readers = [reader for reader in self._readers() if self._owner(reader.lane) == self.dp.rank]
        ahead = ReadAhead(readers, math.ceil(self.batch_size / self._num_lanes), self._loader_options)
        try:
            steps = 1
            ahead.fill(1)
            if self.dp.size > 1 and ahead.error is None:  # whether samples can be sent, since the last steps send some
                try:
                    pack(ahead.first_sample(), "a sample")
                except UnsupportedValue as error:
                    ahead.error = error
            while batches := self._plan(ahead, steps):
                for number, (batch, rows) in enumerate(self._hand_over(batches, ahead), 1):
                    for lane in batch:
                        self._lanes[lane].taken += 1
                        self._lanes[lane].known -= 1
                    self.samples += rows.total
                    yield rows
                    # Read ahead step by step, so that planning finds its samples already read.
                    ahead.fill(self._needed(number))
                steps = min(2 * steps, PLAN_STEPS)
        finally:
            ahead.close()
        self._lanes, self.samples, self.epoch = self._new_lanes(), 0, self.epoch + 1

    def _plan(self, ahead: ReadAhead, steps: int) -> list[list[int]]:
        """Return the lanes of the rows of the next batches, the same on all ranks; an empty list at the end."""
        while not all(lane.is_dry for lane in self._lanes):
            ahead.fill(self._needed(steps))
            self._learn(self._meet({"position": self._position(), "lanes": ahead.report()}, ahead))
            batches = next_batches(self._lanes, self.batch_size, steps)
            if batches and self.drop_last and len(batches[-1]) < self.batch_size:
                self.dropped = len(batches.pop())
                return batches
            if batches:
                return batches
        return []

    def _needed(self, steps: int) -> int:
        """Return how many samples of each lane ``steps`` batches need, if no further lane ends before."""
        return math.ceil(steps * self.batch_size / max(1, sum(not lane.ended for lane in self._lanes)))

    def _learn(self, reports: list[Any]) -> None:
        for report in reports:
            for number, (known, ended, starts) in report["lanes"].items():
                lane = self._lanes[number]
                lane.known, lane.ended = known, ended
                lane.starts += [entry for entry in starts if entry > lane.starts[-1]]

    def _hand_over(self, batches: list[list[int]], ahead: ReadAhead) -> Iterator[tuple[list[int], StreamRows]]:
        """Yield each planned batch with this rank's rows, after receiving the rows that other ranks have read."""
        rank = self.dp.rank
        owners = [[self._owner(lane) for lane in batch] for batch in batches]
        shares = [deal(of_batch, self.dp.size) for of_batch in owners]
        own = {
            (number, row): ahead.take(lane)
            for number, batch in enumerate(batches)
            for row, lane in enumerate(batch)
            if owners[number][row] == rank
        }
        moved = {
            (number, row)
            for number, of_batch in enumerate(shares)
            for taker, share in enumerate(of_batch)
            for row in share or [BLANK]
            if owners[number][row] != taker
        }
        samples = dict(own)
        if moved:
            message = {"position": self._position(), "rows": {key: own[key] for key in sorted(moved & own.keys())}}
            for others in self._meet(message):
                samples.update(others["rows"])
        for number, batch in enumerate(batches):
            share = shares[number][rank]
            rows = [samples[number, row] for row in share or [BLANK]]
            yield batch, StreamRows(rows, is_blank=not share, total=len(batch))

    def _meet(self, message: dict[str, Any], ahead: ReadAhead | None = None) -> list[Any]:
        """Return the messages of all ranks. If reading failed on one rank, all ranks raise."""
        error = ahead.error if ahead else None
        if error is not None:
            message["error"] = "".join(traceback.format_exception(error))
        messages = self._gather(message)
        if error is not None:
            self.failure = error
            raise error
        for rank, other in enumerate(messages):
            if "error" in other:
                raise PeerFailedError(f"rank {rank} of {self.dp.name} could not read its samples:\n{other['error']}")
        differing = {str(other["position"]): rank for rank, other in enumerate(messages)}
        if len(differing) > 1:
            said = "; ".join(f"rank {rank}: {position}" for position, rank in differing.items())
            raise ValueError(
                f"the ranks of {self.dp.name} must read the same stream from the same position, but differ: {said}"
            )
        return messages

    def _position(self) -> dict[str, Any]:
        return {**self._order, "epoch": self.epoch, "samples": self.samples, "batch_size": self.batch_size}

    def _owner(self, lane: int) -> int:
        return lane % self.dp.size

    def _new_lanes(self) -> list[Lane]:
        return [Lane() for _ in range(self._num_lanes)]

    def _readers(self) -> Iterator[LaneReader]:
        seed = f"{self._order['seed']} {self.epoch}"
        shards = list(range(self.source.num_shards))
        if self._order["shuffle"]:
            random.Random(f"{seed} shards").shuffle(shards)
        for number, lane in enumerate(self._lanes):
            if not lane.is_dry:
                window, own = self._order["window"], shards[number :: self._num_lanes]
                place, base = lane.starts[-1]
                yield LaneReader(self.source, number, own, window, f"{seed} {number}", lane.taken, place, base)


@own_collectives()
def gather_objects(value: object, axis: Axis) -> list[Any]:
    """Return the value of every rank of the axis, in order of rank.

    Raises:
        ValueError: on every rank, if a rank's value cannot be sent (see ``pack``).
    """
    if axis.size == 1:
        return [value]
    return values_of_all(value, axis.group)
