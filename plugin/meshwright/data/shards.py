"""Sources of numbered shards of samples, the readers of lanes of shards, and the errors of reading samples.

The shards of a lane are read one after another and shuffled within windows: samples 0 to w-1 in a seeded order, then
samples w to 2w-1, and so on. So sample k of a lane depends only on the data, the seed and k, and reading resumes from
the number of samples. (The contents of a shuffle buffer would have to be saved.)

An error of the user's dataset or collate function says which rows were read.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils.data import Dataset

from meshwright.errors import DivergenceError, LoaderError, PeerFailedError

READ_TOGETHER = 64  # the number of rows that a dataset decodes at once


@runtime_checkable
class ShardedSource(Protocol):
    """A source of samples in numbered shards. A shard can be opened at any sample, any number of times.

    A source may have a ``fingerprint``, a short text. A stream refuses a state with a different fingerprint.
    """

    @property
    def num_shards(self) -> int:
        """The number of shards."""

    def open(self, shard: int, start: int) -> Iterator[Any]:
        """Return the samples of one shard from sample ``start`` on. Every call must return the same samples."""


class ListedShards:
    """Shards given as a list of iterables, or of functions that return an iterable."""

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

    def files_of(self, shard: int) -> list[str]:
        """Return the arguments of the function that opens a shard, such as ``partial(read, "a.jsonl")``."""
        opened = self._shards[shard]
        return [str(x) for x in opened.args] if isinstance(opened, functools.partial) else []


class DatasetShards:
    """The shards of a dataset with ``num_shards``, ``shard`` and ``iter``, such as Hugging Face's IterableDataset."""

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
        """The dataset's builder, config, version, split and columns as text, obtained without reading the dataset."""
        info = getattr(self._dataset, "info", None)
        said = [getattr(info, name, None) for name in ("builder_name", "config_name", "version")]
        said += [getattr(self._dataset, name, None) for name in ("split", "column_names")]
        return " ".join(str(part) for part in said if part is not None)

    def open(self, shard: int, start: int) -> Iterator[Any]:
        one = self._dataset.shard(num_shards=self.num_shards, index=shard)
        # In a DataLoader's worker, iter(one) would split the shard over the workers.
        return islice(_rows(one.iter(batch_size=READ_TOGETHER)), start, None)

    def files_of(self, shard: int) -> list[str]:
        """Return the files of a shard, as far as the dataset tells."""
        return files_of(self._dataset.shard(num_shards=self.num_shards, index=shard))


def as_source(dataset: object) -> ShardedSource:
    """Return a dataset as a ShardedSource.

    Args:
        dataset: a ShardedSource, a list of iterables or of functions that return an iterable, or a Hugging Face
            iterable dataset.

    Raises:
        ValueError: the dataset has no numbered shards, has 0 shards, or is split by node already.

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
        raise ValueError("the dataset has 0 shards, so there is nothing to read; pass a dataset with at least 1 shard")
    return source


@dataclass(frozen=True)
class Chunk:
    """Consecutive samples of one lane.

    Args:
        lane: the lane's number.
        samples: the samples.
        starts: for each shard opened since the previous chunk, its index in the lane and the number of the lane's
            samples before it.
        ended: whether the lane has no more samples.
    """

    lane: int
    samples: list[Any]
    starts: list[tuple[int, int]]
    ended: bool


@dataclass
class LaneReader:
    """Reads the samples of one lane in chunks, from sample ``taken`` on.

    Args:
        source: the source to read.
        lane: the lane's number.
        shards: the numbers of the lane's shards, in order.
        window: the number of samples per shuffled window; 1 keeps the order.
        seed: the seed of the shuffling.
        taken: the number of the lane's samples to skip.
        shard, base: the index in ``shards`` of the first shard to open, and the number of the lane's samples before
            this shard, which is at most ``window_start(taken, window)``.
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
            row = skip
            try:
                for sample in self.source.open(self.shards[place], skip):
                    count += 1
                    row += 1
                    yield sample
            except Exception as error:
                error.add_note(f"at or after row {row} of {_said(self.source, self.shards[place])}")
                raise


def _said(source: ShardedSource, shard: int) -> str:
    """Return a shard's number and, if the source tells, its files."""
    files = source.files_of(shard) if isinstance(source, ListedShards | DatasetShards) else []
    return f"shard {shard} of {source.num_shards}" + (f" ({', '.join(files)})" if files else "")


def window_start(taken: int, window: int) -> int:
    """Return the first sample of the window that contains sample ``taken``."""
    return taken // window * window


def shuffled(samples: Iterator[Any], window: int, seed: str, number: int = 0) -> Iterator[Any]:
    """Yield the samples, shuffled within windows. ``number`` is the number of the first window.

    While a window's samples are yielded, each is replaced in memory by a sample of the next window. So at most
    ``window`` samples are held, and reading keeps pace with yielding.
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


def _own(value: object) -> Any:
    """Return a copy of a view of a decoded batch. The view would keep the batch in memory, and be pickled with it."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if hasattr(value, "__array_interface__") else value


@contextmanager
def reading(where: Callable[[], str]) -> Iterator[None]:
    """Raise an error of the block again, as an error of the same class that says what was read.

    Args:
        where: a function that returns what the block reads.

    Raises:
        LoaderError: the block failed. The error is also an instance of the class of the error that was raised.
    """
    try:
        yield
    except (LoaderError, DivergenceError, PeerFailedError):
        raise
    except Exception as error:
        raise located(error, where()) from error


def located(error: Exception, where: str) -> Exception:
    """Return an error of the same class whose message says what was read when the error was raised."""
    kind = type(error)
    try:
        namespace = {"__module__": kind.__module__, "__str__": LoaderError.__str__}
        made = type(kind.__name__, (kind, LoaderError), namespace)
        found: LoaderError = made.__new__(made, *error.args)
        found.args = error.args
        found.__dict__.update({name: value for name, value in vars(error).items() if name != "__notes__"})
    except Exception:  # a class that cannot have subclasses, or whose objects need other arguments
        found = LoaderError(*error.args)
    place = ", ".join([where, *getattr(error, "__notes__", ())])
    found.text = f"{place} could not be read: {kind.__name__}" + (f": {error}" if str(error) else "")
    return found


def name_of(dataset: object) -> str:
    """Return the class of a dataset and, if it says so, the files from which it was made."""
    files = files_of(dataset)
    return f"the {type(dataset).__name__}" + (f" of {', '.join(files[:3])}" if files else "")


def files_of(dataset: object) -> list[str]:
    """Return the files of a dataset of ``datasets``: those in its cache, or that its function of a stream reads."""
    if cached := getattr(dataset, "cache_files", None):
        return [entry["filename"] for entry in cached]
    stage = getattr(dataset, "_ex_iterable", None)
    while (inner := getattr(stage, "ex_iterable", None)) is not None:
        stage = inner
    for value in getattr(stage, "kwargs", {}).values():
        if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
            return value
    return []


def first_failing(dataset: Dataset[object], indices: Iterable[int]) -> int | None:
    """Return the first index whose row cannot be read alone; None if all rows can."""
    for index in indices:
        try:
            dataset[index]
        except Exception:
            return index
    return None
