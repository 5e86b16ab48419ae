"""Reads and collates this rank's rows of each global batch of a map-style dataset, from any sample on."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, auto
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Generator
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info

from meshwright.data.collation import Collate
from meshwright.data.collation_trial import TRIED, CollationTrial, RowsFinding, Trials, cut_rows
from meshwright.data.fingerprint import fingerprint
from meshwright.data.global_batches import Portion, Share, Sharing
from meshwright.data.one_length import KeepingSamples, only_stacks, portion_of
from meshwright.data.readers.base import NAMED, WORKER_SEEDS, Position, Reader, StateForm, worker_options
from meshwright.data.sampler_order import Batches, Sampling
from meshwright.data.shards import first_failing, name_of, reading
from meshwright.data.shuffling import Draws, InOrder, Order
from meshwright.mesh.axes import Axis
from meshwright.outside_files import LARGEST_COUNT, integer, maybe
from meshwright.parallel.batch.items import BatchFormat
from meshwright.plan.loader_options import DrawsOf
from meshwright.random_states import RandomStates, seed_all

_MANY_ROWS = 4096  # of a batch, which take long to read on every rank


class Way(Enum):
    """How a batch is read."""

    OWN = auto()  # a rank's rows alone
    WHOLE = auto()  # all rows, which the main process cuts
    TRIED = auto()  # all rows, to find out which of the others is right


class Request(list[Any]):
    """The indices of the rows of a batch, and how they are to be read."""

    def __init__(self, indices: list[Any], way: Way):
        super().__init__(indices)
        self.way = way

    def __reduce__(self) -> tuple[Any, ...]:
        return Request, (list(self), self.way)


class BatchReading(Dataset[Any]):
    """The user's dataset and collate function as one dataset, whose items are batches.

    It gives the reading DataLoader, for each :class:`Request`, what was collated and what a trial has found.

    Args:
        dataset: the user's dataset.
        collate: the user's collate function.
        own: the function that collates a rank's rows alone, which may keep their samples.
        trial: what tries a batch.
    """

    def __init__(self, dataset: Any, collate: Collate, own: Collate, trial: CollationTrial):
        self.dataset, self._collate, self._own, self._trial = dataset, collate, own, trial

    def __getitems__(self, request: Request) -> tuple[Any, RowsFinding | None]:
        if request.way is Way.OWN:
            return self._own(self._read(request)), None
        if request.way is Way.WHOLE:
            return self._collate(self._read(request)), None
        before = RandomStates(self.dataset, self._collate)
        again: Callable[[Share], Any] | None = None
        if reads_together(self.dataset):
            again = lambda share: self._read(request[share.low : share.high])  # noqa: E731
        return self._trial.of(self._read(request), len(request), before, again)

    def _read(self, indices: list[Any]) -> Any:
        """Return the samples as a DataLoader of the user's dataset reads them."""
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(list(indices))
        return [self.dataset[index] for index in indices]


class After(IterableDataset[Any]):
    """A stream without its first samples.

    Args:
        dataset: the user's dataset.
        samples: the number of samples that are left out.
    """

    def __init__(self, dataset: Iterable[Any], samples: int):
        self.dataset, self._samples = dataset, samples

    def __iter__(self) -> Iterator[Any]:
        return islice(self.dataset, self._samples, None)


def reads_together(dataset: Any) -> bool:
    """Return whether a dataset has a function that reads several rows at once."""
    while isinstance(dataset, Subset):  # which has one that passes on to its dataset
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def count_tried(loader: DataLoader[Any], dp: Axis, draws: DrawsOf) -> int:
    """Return how many batches of a loader are tried.

    One shows enough where rows are only stacked, which may only be drawn, and where a batch has many rows.
    """
    if dp.size == 1 or draws == "rank":
        return 0
    rows = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 0
    stacks = only_stacks(loader.collate_fn) and not reads_together(loader.dataset)
    return 1 if stacks or rows > _MANY_ROWS else TRIED


def as_read(batch: Any) -> Any:
    """The collate function of a DataLoader of a :class:`BatchReading`."""
    return batch


class WorkerStart:
    """Seeds a worker as the user's own DataLoader would on one device.

    ``seed`` is what that loader has drawn for its workers, and is set before they start.

    Args:
        init: the user's ``worker_init_fn``.
    """

    def __init__(self, init: Callable[[int], None] | None):
        self.seed, self._init = 0, init

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        # A worker_init_fn may read them.
        object.__setattr__(info, "seed", self.seed + worker_id)
        if isinstance(info.dataset, BatchReading | After):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        seed_all(self.seed + worker_id, torch.utils.data._utils.worker._generate_state(self.seed, worker_id))
        if self._init is not None:
            self._init(worker_id)


def loader_of(
    loader: DataLoader[Any], dataset: Dataset[Any], start: WorkerStart, generator: Generator, **batches: Any
) -> DataLoader[Any]:
    """Return a DataLoader with the settings of the user's that reads another dataset, in other ``batches``."""
    return DataLoader(
        dataset,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        generator=generator,
        **worker_options(loader) | {"worker_init_fn": start if loader.num_workers else None},
        **batches,
    )


logger = logging.getLogger(__name__)


class MapReader(Reader):
    """Reads a map-style dataset by index, in the order of the user's sampler.

    A state counts samples, so it is valid on any number of ranks and workers and with any batch size.

    Args:
        loader: the user's loader, over a map-style dataset.
        dp: the axis along which ranks read different rows.
        share: the function that chooses a rank's rows of a batch.
        seed: the seed of the shuffling, instead of the loader's generator.
        name: a name for the dataset, instead of its fingerprint.
        keeps_samples: whether portions hold their samples.
        draws: whether draws are those of one device ("batch"), or each rank's own ("rank").
        format: what the inputs of a batch mean.

    Raises:
        ValueError: the dataset is empty.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        dp: Axis,
        share: Sharing,
        *,
        seed: int | None = None,
        name: str | None = None,
        keeps_samples: bool = False,
        draws: DrawsOf = "batch",
        format: BatchFormat | None = None,
    ):
        if len(loader.dataset) == 0:  # type: ignore[arg-type]
            raise ValueError(f"the dataset is empty: a {type(loader.dataset).__name__} with 0 samples")
        self.position = Position()
        self.least: int | None = None  # the number of rows of the current epoch's smallest batch
        self._sampling = Sampling(loader, seed)
        self._fingerprint = fingerprint(loader.dataset) if name is None else name
        self.identity = fingerprint(loader.dataset, has_numbers=True) if name is None else name
        self._user_loader, self._dp, self._share = loader, dp, share
        self._collate: Collate = KeepingSamples(loader.collate_fn) if keeps_samples else loader.collate_fn
        self._trial = CollationTrial(loader.collate_fn, dp, share, keeps_samples=keeps_samples)
        self._trials = Trials(count_tried(loader, dp, draws), format)
        self._indices = _RankIndices(dp, share, self._sampling.exhaust, self._trials)
        self._generator = Generator()
        self._inner: DataLoader[Any] | None = None
        self._order: int | None = None  # a digest of the epoch's order, if the user's sampler drew it

    def __len__(self) -> int:
        return len(self._sampling)

    @property
    def batch_size(self) -> int | None:
        return self._sampling.batch_size

    @property
    def seed(self) -> int | None:
        return self._sampling.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._sampling.seed = seed

    @property
    def generator(self) -> Generator | None:
        """The generator from which the shuffled orders are drawn; None if there is none."""
        return self._sampling.generator

    @property
    def is_repeatable(self) -> bool:
        return self._sampling.is_repeatable

    def describe(self) -> dict[str, str]:
        sampling = self._sampling
        return {
            "samples": str(sampling.length),
            "order": sampling.kind,
            "batch size": str(sampling.batch_size),
            "drop_last": str(sampling.drop_last),
            "has a generator or seed": str(sampling.generator is not None),
        }

    def draw(self) -> Draws:
        return self._sampling.draw(self.position.epoch, self.position.samples)

    @property
    def follows_torch(self) -> bool:
        return self._sampling.follows_torch

    def read(self, draws: Draws) -> Iterator[Portion]:
        position = self.position
        order, batches = self._sampling.begin(draws.order, position.epoch)
        if self._sampling.kind == "listed":
            drawn = zlib.crc32(repr(draws.order).encode())
            if position.samples and self._order not in (None, drawn):
                raise ValueError(
                    "the loader's sampler drew a different order than in the epoch of the state, so the samples not "
                    "yet seen are unknown; give the sampler the same seed or state before the loop resumes"
                )
            self._order = drawn
        self._indices.begin(order, batches, position.samples)
        self._dropped, self.least = batches.dropped(position.samples), batches.least(position.samples)
        batches_read = self._begin(draws)
        for number, (start, rows) in enumerate(batches.after(position.samples)):
            share = self._share(rows, self._dp)
            with reading(partial(self._where, start, share, rows)):
                is_whole = self._trials.reads_whole
                batch, finding = next(batches_read)
                if finding is not None:
                    batch, verdict = self._trials.settle(batch, finding, share, rows, self._dp.size)
                    self._trials.take(verdict, is_told=self._dp.rank == 0)
                    if self._trials.reads_whole and self._user_loader.num_workers:
                        batches_read = self._begin_again(draws, number)
                        is_whole, (batch, _) = True, next(batches_read)
                if is_whole:
                    batch = cut_rows(batch, share, rows, self._trials.format)
            position.samples = start + rows
            yield portion_of(share, batch, rows)
        assert next(batches_read, None) is None  # on one device, too, the sampler is asked for a batch after the last
        position.finish()
        self._sampling.finish()

    def set_epoch(self, epoch: int) -> None:
        place = (self.position.epoch, self.position.samples)
        self.position.set_epoch(epoch)
        if (self.position.epoch, self.position.samples) != place:
            self._sampling.leave()
        self._tell_epoch()

    def skip(self, samples: int) -> None:
        """Start the next iteration after this many samples of its epoch, as a new DataLoader would."""
        self._sampling.renew_workers()
        if not self.position.is_fresh:
            self._sampling.leave()
            self.position.set_epoch(self.position.epoch + 1)
        self.position.samples = min(samples, self._sampling.length)

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.position.state("map"),
            **self._settings(),
            "drawn": self._order if self.position.samples else None,
            **self._sampling.state(),
        }

    def form_of(self, state: Mapping[str, Any]) -> StateForm:
        required, optional = self._sampling.fields(state)
        return StateForm(
            equal={f"sample k would be a different one. {NAMED}": {"reader": "map", **self._settings()}},
            fields=required,
            optional={"drawn": maybe(integer(0, 2**32)), **optional},
            most=self._sampling.length if self._sampling.kind != "listed" else LARGEST_COUNT,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position.load(state)
        self._sampling.load(state)
        self._order = state.get("drawn")
        self._tell_epoch()

    def _settings(self) -> dict[str, Any]:
        sampling = self._sampling
        return {
            "length": sampling.length,
            "dataset": self._fingerprint,
            "order": sampling.kind,
            "seed": sampling.seed,
        }

    def _where(self, start: int, share: Share, rows: int) -> str:
        """Return which rows were read, for an error: their indices in the dataset and their place in the epoch."""
        dataset = self._user_loader.dataset
        is_own = not (self._trials.reads_whole or self._trials.left > 0)
        low, high = (share.low, share.high) if is_own else (0, rows)
        indices = self._indices.take(start + low, start + high)
        row = first_failing(dataset, indices)
        said = f"rows {', '.join(map(str, indices))}" if row is None else f"row {row}"
        place = f"samples {start + low} to {start + high - 1} of epoch {self.position.epoch}"
        return f"{said} of {name_of(dataset)} ({place})"

    def _tell_epoch(self) -> None:
        """Pass the epoch to the user's dataset and samplers, which may have a different order for each epoch."""
        loader = self._user_loader
        batch_sampler = loader.batch_sampler
        for part in (loader.dataset, getattr(batch_sampler, "sampler", None), batch_sampler):
            if callable(tell := getattr(part, "set_epoch", None)):
                tell(self.position.epoch)

    def _begin(self, draws: Draws) -> Iterator[tuple[Any, RowsFinding | None]]:
        """Start to read from the position on, with the workers' seeds of one device if batches are read whole."""
        self._generator.manual_seed(draws.worker_seed % WORKER_SEEDS)
        loader = self._loader()
        self._start.seed = draws.worker_seed + (0 if self._trials.reads_whole else self._dp.rank)
        return iter(loader)

    def _begin_again(self, draws: Draws, count: int) -> Iterator[tuple[Any, RowsFinding | None]]:
        """Read whole batches from the position on, without the first ``count``, which were returned.

        Workers have read later batches by the rank's rows already. New ones read the first batches, too, since what
        they draw for later ones follows.
        """
        self._inner = None
        batches_read = self._begin(draws)
        for _ in range(count):
            next(batches_read)
        return batches_read

    def _loader(self) -> DataLoader[Any]:
        """Return the DataLoader that reads, the same one in all epochs so that its workers may persist."""
        if self._inner is None:
            loader = self._user_loader
            self._start = WorkerStart(loader.worker_init_fn)
            self._inner = loader_of(
                loader,
                BatchReading(loader.dataset, loader.collate_fn, self._collate, self._trial),
                self._start,
                self._generator,
                batch_sampler=self._indices,
                collate_fn=as_read,
            )
        return self._inner


class _RankIndices:
    """The batch sampler of the reading DataLoader; it yields what this rank is to read of each batch.

    Args:
        exhaust: a function called at the point where the sampler would end on one device. With workers, this point
            comes before the loop reaches the last batch.
        trials: which batches to read whole.
    """

    def __init__(self, dp: Axis, share: Sharing, exhaust: Callable[[], None], trials: Trials):
        self._dp, self._share, self._exhaust = dp, share, exhaust
        self._order: Order = InOrder()
        self._batches: Batches | None = None
        self._samples = 0
        self._trials = trials

    def begin(self, order: Order, batches: Batches, samples: int) -> None:
        self._order, self._batches, self._samples = order, batches, samples

    def take(self, start: int, stop: int) -> list[Any]:
        """Return the dataset indices of the epoch's samples ``start`` to ``stop - 1``."""
        return self._order.take(start, stop)

    def __iter__(self) -> Iterator[Request]:
        assert self._batches is not None
        tried = self._trials.left  # which falls as the batches come back
        for number, (start, rows) in enumerate(self._batches.after(self._samples)):
            if rows < self._batches.most:
                self._exhaust()  # a BatchSampler reaches its sampler's end while it fills the last batch
            way = Way.WHOLE if self._trials.reads_whole else Way.TRIED if number < tried else Way.OWN
            share = self._share(rows, self._dp)
            low, high = (share.low, share.high) if way is Way.OWN else (0, rows)
            yield Request(self._order.take(start + low, start + high), way)
        self._exhaust()
