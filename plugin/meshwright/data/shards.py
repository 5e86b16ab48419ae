"""Numbered shards of samples, and the lanes that read them.

A lane reads its shards one after another and shuffles within windows: samples 0 to w-1 in a seeded order, then
samples w to 2w-1, and so on. So sample k of a lane depends only on the data, the seed and k, and a lane resumes from
its number of samples; a reservoir would have to be saved.
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
    """A source to stream: numbered shards, each of which can be opened at any sample, any number of times.

    It may have a ``fingerprint``, a short text; a stream refuses a state with a different one.
    """

    @property
    def num_shards(self) -> int:
        """How many shards there are."""

    def open(self, shard: int, start: int) -> Iterator[Any]:
        """Return the samples of one shard, from sample ``start`` on, the same at every call."""


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
    """The shards of an iterable dataset with ``num_shards``, ``shard`` and ``iter``, such as Hugging Face's."""

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
        count: int = self._dataset.num_shards
        return count

    @property
    def fingerprint(self) -> str:
        """A text of what is known about the dataset without reading it."""
        info = getattr(self._dataset, "info", None)
        said = [getattr(info, name, None) for name in ("builder_name", "config_name", "version")]
        said += [getattr(self._dataset, name, None) for name in ("split", "column_names")]
        return " ".join(str(part) for part in said if part is not None)

    def open(self, shard: int, start: int) -> Iterator[Any]:
        one = self._dataset.shard(num_shards=self.num_shards, index=shard)
        # Not iter(one): in a worker of a DataLoader that would split the shard over the workers.
        return islice(_rows(one.iter(batch_size=READ_TOGETHER)), start, None)


def as_source(dataset: Any) -> ShardedSource:
    """Return the shards of a dataset.

    Args:
        dataset: a ShardedSource, a list of iterables or of functions that return one, or a Hugging Face iterable
            dataset.

    Raises:
        ValueError: the dataset's shards are not numbered, there are none, or it is split by node already.

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
            f"a {type(dataset).__name__} has no numbered shards; pass [dataset] to read it as one shard, or a list "
            "with one iterable per file"
        )
    if source.num_shards == 0:
        raise ValueError("the dataset has 0 shards, so there is nothing to read; pass one that has at least 1")
    return source


@dataclass(frozen=True)
class Chunk:
    """Some samples of one lane.

    Args:
        lane: the lane's number.
        samples: the samples, which follow those of the lane's previous chunk.
        starts: for each shard opened since then, its place in the lane and the number of the lane's samples before it.
        ended: whether the lane has no more samples.
    """

    lane: int
    samples: list[Any]
    starts: list[tuple[int, int]]
    ended: bool


@dataclass
class LaneReader:
    """Reads one lane, from some sample on, in chunks.

    Args:
        source: the source to read.
        lane: the lane's number.
        shards: the shards it reads, in order.
        window: the number of samples shuffled together; 1 keeps the order.
        seed: the seed of the shuffling.
        taken: the number of samples to leave out.
        shard, base: the shard to begin with, by its place in ``shards``, and the number of samples before it, at most
            ``window_start(taken, window)``.
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
        """Yield all chunks; each but the last has ``size`` samples."""
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
    """Return the first sample of the window that gives the next sample after ``taken`` samples."""
    return taken // window * window


def shuffled(samples: Iterator[Any], window: int, seed: str, number: int = 0) -> Iterator[Any]:
    """Yield the samples shuffled within windows, the first of which is window ``number``.

    As a window's samples are yielded, the next window's take their places. So ``window`` samples are held, and one is
    read for each that is yielded.
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
    """Copy a view, which would keep all rows decoded with it in memory, and be pickled with them."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if hasattr(value, "__array_interface__") else value
