"""Numbered shards of samples, and the lanes that read them.

A lane reads its shards one after another and shuffles within windows: samples 0 to w-1 in a seeded order, then
samples w to 2w-1, and so on. Sample k of a lane is so a function of the data, the seed and k alone, and a lane is
taken up again by its number of samples, where a reservoir would have to be saved.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

READ_TOGETHER = 64  # rows that a dataset decodes at once


@runtime_checkable
class ShardedSource(Protocol):
    """What can be streamed: a number of shards, each of which can be opened anywhere, any number of times.

    It may have a ``fingerprint``, a short text: a state of a stream with another one is refused.
    """

    @property
    def num_shards(self) -> int:
        """How many shards there are."""

    def open(self, shard: int, start: int) -> Iterator[Any]:
        """The samples of one shard, from sample ``start`` on; the same ones at every call."""


class ListedShards:
    """Shards given as a list of iterables, or of functions that return one."""

    def __init__(self, shards: Sequence[Iterable[Any] | Callable[[], Iterable[Any]]]):
        for number, shard in enumerate(shards):
            if isinstance(shard, Iterator) or not (callable(shard) or isinstance(shard, Iterable)):
                raise ValueError(
                    f"shard {number} of {len(shards)} is a {type(shard).__name__}, which cannot be read a second time "
                    "to resume; pass a function that returns a new iterator, or a list"
                )
        self._shards = shards

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def open(self, shard: int, start: int) -> Iterator[Any]:
        opened = self._shards[shard]
        return islice(opened() if callable(opened) else opened, start, None)


class DatasetShards:
    """The shards of an iterable dataset that has ``num_shards``, ``shard`` and ``iter``, as Hugging Face's has."""

    def __init__(self, dataset: Any):
        if getattr(dataset, "_distributed", None) is not None:
            node = dataset._distributed
            raise ValueError(
                f"the dataset was split by node already (rank {node.rank} of {node.world_size}), and would be split a "
                "second time; pass it as it was before split_dataset_by_node"
            )
        self._dataset = dataset

    @property
    def num_shards(self) -> int:
        return self._dataset.num_shards

    @property
    def fingerprint(self) -> str:
        """What is known of the dataset without reading it."""
        info = getattr(self._dataset, "info", None)
        said = [getattr(info, name, None) for name in ("builder_name", "config_name", "version")]
        said += [getattr(self._dataset, name, None) for name in ("split", "column_names")]
        return " ".join(str(part) for part in said if part is not None)

    def open(self, shard: int, start: int) -> Iterator[Any]:
        one = self._dataset.shard(num_shards=self.num_shards, index=shard)
        # Not iter(one): in a worker of a DataLoader that would split the shard over the workers.
        return islice(_rows(one.iter(batch_size=READ_TOGETHER)), start, None)


def as_source(dataset: Any) -> ShardedSource:
    """The shards of a dataset.

    Args:
        dataset: a ShardedSource, a list of iterables or of functions that return one, or an iterable dataset of
            Hugging Face.

    Raises:
        ValueError: it has no numbered shards, none at all, or is split by node already.

    Example:
        >>> list(as_source([range(3), range(3, 5)]).open(1, start=1))
        [4]
    """
    if isinstance(dataset, ShardedSource):
        source = dataset
    elif isinstance(dataset, list | tuple):
        source = ListedShards(dataset)
    elif all(hasattr(dataset, name) for name in ("num_shards", "shard", "iter")):
        source = DatasetShards(dataset)
    else:
        raise ValueError(
            f"a {type(dataset).__name__} has no numbered shards; pass [dataset] to read it as one, or a list with one "
            "iterable a file"
        )
    if source.num_shards == 0:
        raise ValueError("the dataset has 0 shards, so there is nothing to read; pass one that has at least 1")
    return source


@dataclass(frozen=True)
class Chunk:
    """Some samples of one lane.

    Args:
        lane: the lane.
        samples: they follow those of the lane's chunk before.
        starts: of each shard opened since then, its place in the lane and the lane's samples before it.
        ended: whether the lane has no more.
    """

    lane: int
    samples: list[Any]
    starts: list[tuple[int, int]]
    ended: bool


@dataclass
class LaneReader:
    """Reads one lane, from some sample on, in chunks.

    Args:
        source: what to read.
        lane: its number.
        shards: the shards it reads, in order.
        window: samples shuffled together; 1 keeps the order.
        seed: of the shuffling.
        taken: samples to leave out.
        shard, base: a shard, by its place in ``shards``, and the samples before it; at most
            ``window_start(taken, window)`` of them.
    """

    source: ShardedSource
    lane: int
    shards: Sequence[int]
    window: int
    seed: str
    taken: int = 0
    shard: int = 0
    base: int = 0
    _starts: list[tuple[int, int]] = field(default_factory=list)

    def chunks(self, size: int) -> Iterator[Chunk]:
        """All chunks; each but the last has ``size`` samples."""
        start = window_start(self.taken, self.window)
        ordered = shuffled(self._samples(start), self.window, self.seed, start // self.window)
        samples = islice(ordered, self.taken - start, None)
        ended = False
        while not ended:
            part = list(islice(samples, size))
            ended = len(part) < size
            starts, self._starts = self._starts, []
            yield Chunk(self.lane, part, starts, ended)

    def _samples(self, start: int) -> Iterator[Any]:
        count = start
        for place in range(self.shard, len(self.shards)):
            skip = start - self.base if place == self.shard else 0
            self._starts.append((place, count - skip))
            for sample in self.source.open(self.shards[place], skip):
                count += 1
                yield sample


def window_start(taken: int, window: int) -> int:
    """The first sample of the window from which the next one after ``taken`` samples comes."""
    return taken // window * window


def shuffled(samples: Iterator[Any], window: int, seed: str, number: int = 0) -> Iterator[Any]:
    """Samples shuffled within windows of which the first is window ``number``.

    A window's places are filled with the next one's samples as they come free, so that ``window`` samples are
    held, and one is read for each that is given.
    """
    if window == 1:
        yield from samples
        return
    held = list(islice(samples, window))
    while held:
        order = list(range(len(held)))
        random.Random(f"{seed} {number}").shuffle(order)
        following: list[Any] = []
        for index in order:
            yield held[index]
            held[index] = None
            following.extend(islice(samples, 1))
        held, number = following, number + 1


def _rows(batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        for index in range(len(next(iter(batch.values()), ()))):
            yield {name: _own(column[index]) for name, column in batch.items()}


def _own(value: Any) -> Any:
    """A view would keep all rows decoded with it in memory, and be pickled with them."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if hasattr(value, "__array_interface__") else value
