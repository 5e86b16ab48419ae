"""Reads a dataset that can only be iterated. Every rank reads the whole dataset and keeps its own rows."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeGuard

from torch import Generator
from torch.utils.data import DataLoader, Dataset, IterableDataset

from meshwright.data.common_states import CommonStates
from meshwright.data.epoch_start import START_FIELDS, EpochStart
from meshwright.data.fingerprint import fingerprint, outline
from meshwright.data.global_batches import Portion, Share, Sharing
from meshwright.data.nested import digest, take_rows, why_no_batch
from meshwright.data.one_length import KeepingSamples, portion_of
from meshwright.data.own_rows import NOT_CUT, READS_WHOLE, cut_rows, has_drawn_on_any, own_rows
from meshwright.data.peers import Peers, check_same_rows
from meshwright.data.random_states import RandomStates, WorkerStart
from meshwright.data.read_errors import name_of, reading
from meshwright.data.readers.base import (
    MOST_EPOCHS,
    NAMED,
    WORKER_SEEDS,
    Position,
    Reader,
    check_equal,
    check_fields,
    worker_options,
)
from meshwright.data.shuffling import GENERATOR, Draws, WorkerSeeds, decoded, encoded
from meshwright.errors import PlanError
from meshwright.mesh.axes import Axis
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.plan.config import DrawsOf
from meshwright.schema import boolean, integer, maybe

logger = logging.getLogger(__name__)

ENDED = -1
_OPTIONAL = {**START_FIELDS, "generator": GENERATOR, "collate_may_draw": boolean}
_NONE = object()  # in place of a batch after the last


class WholeReader(Reader):
    """Reads any iterable of batches, or a DataLoader over a dataset without numbered shards.

    Only the data itself can show that the ranks read the same rows, so the ranks compare a digest of each batch.
    Resuming reads the dataset again up to the saved position, from the random states with which the epoch began. With
    workers, the order depends on the number of workers and on the batch size, so a resumed run must not change them.

    Args:
        loader: the user's loader.
        dp: the axis along which ranks take different rows.
        share: the function that chooses a rank's rows of a batch.
        readers: all ranks that read.
        name: a name for the dataset, instead of its fingerprint.
        keeps_samples: whether portions hold their samples.
        format: what the inputs of a ready batch mean.
        needs_rows: whether each rank must get its rows of each tensor, which a DTensor of all rows consists of.
        draws: whether draws are those of one device ("batch"), or each rank's own ("rank").
    """

    def __init__(
        self,
        loader: Iterable[Any],
        dp: Axis,
        share: Sharing,
        *,
        readers: Peers,
        name: str | None = None,
        keeps_samples: bool = False,
        format: BatchFormat | None = None,
        needs_rows: bool = False,
        draws: DrawsOf = "batch",
    ):
        self.position, self._format, self._needs_rows = Position(), format, needs_rows
        self._loader, self._dp, self._share, self._readers = loader, dp, share, readers
        self._dataset: Any = getattr(loader, "dataset", loader)
        self._name, self._keeps_samples = name, keeps_samples
        self._fingerprint = fingerprint(self._dataset) if name is None else name
        self._batches = 0  # the number of batches returned in this epoch
        self._told: int | None = getattr(self._dataset, "epoch", None)  # the epoch that the dataset is set to
        self._num_workers = getattr(loader, "num_workers", 0)
        self._generator = Generator()
        self._worker_seeds = WorkerSeeds.of(loader) if is_stock(loader) and loader.batch_size else None
        self._cuts_samples = self._worker_seeds is not None
        self._reads_whole: bool | None = None if dp.size > 1 and draws == "batch" else False  # None: not known yet
        self._may_draw = dp.size == 1  # whether the collate function may have drawn random numbers so far
        self._start = EpochStart()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    @property
    def batch_size(self) -> int | None:
        return getattr(self._loader, "batch_size", None)

    def describe(self) -> dict[str, str]:
        dataset = outline(self._dataset) if self._name is None else self._name
        settings = {"batch size": self.batch_size, "num_workers": self._num_workers, "dataset": dataset}
        return {name: str(value) for name, value in settings.items()}

    def draw(self) -> Draws:
        """Draw the seed that a DataLoader draws for its workers; other loaders draw for themselves."""
        samples, seed = self.position.samples, self._start.worker_seed
        if samples and seed is not None:
            return Draws(worker_seed=seed)
        return Draws() if self._worker_seeds is None else self._worker_seeds.draws(samples)

    def read(self, draws: Draws) -> Iterator[Portion]:
        position = self.position
        if position.samples:
            self._start = replace(self._start, worker_seed=draws.worker_seed)
        else:
            self._batches, self._start = 0, EpochStart(draws.worker_seed, CommonStates.now())
        rest = self._rest()
        while True:
            code, portion = next(rest, (ENDED, None))
            if self._readers.count > 1:
                where = f"epoch {position.epoch}, batch {self._batches} of a dataset that every rank reads whole"
                check_same_rows(self._readers, 0, code, where)
            if portion is None:
                break
            position.samples += portion.total
            self._batches += 1
            yield portion
        position.finish()

    def set_epoch(self, epoch: int) -> None:
        self.position.set_epoch(epoch)
        self._tell(epoch)

    def state_dict(self) -> dict[str, Any]:
        is_begun = bool(self.position.samples)
        return {
            **self.position.state("whole"),
            "batches": self._batches if is_begun else 0,
            "dataset_epoch": self._told,
            "dataset": self._fingerprint,
            **self._settings(),
            **self._seeds(),
            **(self._start.state() if is_begun else {}),
            "collate_may_draw": self._may_draw,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        expected = {"reader": "whole", "dataset": self._fingerprint}
        check_equal(state, expected, f"the state is of another dataset. {NAMED}")
        check_equal(state, self._settings(), "the order of a dataset without numbered shards depends on it")
        fields = {"batches": integer(), "dataset_epoch": maybe(integer(0, MOST_EPOCHS))}
        check_fields(state, expected | self._settings(), fields, _OPTIONAL)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position.load(state)
        self._batches, self._start = state["batches"], EpochStart.of(state)
        self._may_draw = state.get("collate_may_draw", True)
        if self._worker_seeds is not None:
            self._worker_seeds.load(state)
            if self._worker_seeds.generator is not None and "generator" in state:
                self._worker_seeds.generator.set_state(decoded(state["generator"]))
        if state["dataset_epoch"] is not None:
            self._tell(state["dataset_epoch"])

    def _tell(self, epoch: int) -> None:
        if callable(tell := getattr(self._dataset, "set_epoch", None)):
            tell(epoch)
            self._told = epoch

    def _seeds(self) -> dict[str, Any]:
        """Return what decides the workers' seeds in later epochs."""
        seeds = self._worker_seeds
        if seeds is None:
            return {}
        return seeds.state() | ({} if seeds.generator is None else {"generator": encoded(seeds.generator.get_state())})

    def _settings(self) -> dict[str, Any]:
        is_elastic = self._cuts_samples and not self._num_workers
        return {"num_workers": self._num_workers, "batch_size": None if is_elastic else self.batch_size}

    def _rest(self) -> Iterator[tuple[int, Portion]]:
        """Yield for each batch after the position a digest of the whole batch, and this rank's portion."""
        skipped = self._batches
        if not self._cuts_samples:
            for batch in self._start.again(self._read(self._loader), skipped):
                yield digest(batch) if self._readers.count > 1 else 0, self._cut(batch)
        elif self._num_workers:
            yield from self._by_workers(skipped)
        else:
            samples = self.position.samples
            collate = getattr(self._loader, "collate_fn", None) if self._may_draw else None
            rest = _After(self._dataset, samples, samples // max(skipped, 1), collate, self._start)
            for code, portion, found in self._read(self._sharing(rest)):
                self._take_note(found)
                yield code, portion

    def _by_workers(self, skipped: int) -> Iterator[tuple[int, Portion]]:
        """Yield the batches after the first ``skipped``; the workers begin again where the first draws are found."""
        seen = -1
        while True:
            for number, (code, portion, found) in enumerate(self._read(self._sharing(self._dataset))):
                if self._take_note(found):
                    break
                if number >= skipped and number > seen:
                    seen = number
                    yield code, portion
            else:
                return

    def _take_note(self, found: Found | None) -> bool:
        """Record that a collate function was found to draw, and return whether batches are read whole from now on."""
        self._may_draw |= found is not None
        if found is None or self._reads_whole is not None:
            return False
        self._reads_whole = found.reads_whole
        if self._dp.rank == 0:
            logger.warning(
                *((READS_WHOLE, self._dp.size, self._dp.size) if found.reads_whole else (NOT_CUT, found.kind))
            )
        return found.reads_whole

    def _read(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches; an error says where in the dataset it was raised."""
        with reading(self._where):
            rest = iter(batches)
        while True:
            with reading(self._where):
                batch = next(rest, _NONE)
            if batch is _NONE:
                return
            yield batch

    def _where(self) -> str:
        place = f"batch {self._batches} of epoch {self.position.epoch}"
        if self.batch_size is not None:
            place += f" (samples {self.position.samples} to {self.position.samples + self.batch_size - 1})"
        return f"{place} of {name_of(self._dataset)}"

    def _sharing(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        """Return the user's DataLoader, changed to collate only this rank's samples."""
        loader = self._loader
        assert isinstance(loader, DataLoader)
        options = worker_options(loader)
        if self._num_workers:
            start = WorkerStart(None, loader.worker_init_fn)
            start.seed = self._start.worker_seed or 0
            options["worker_init_fn"] = start
        self._generator.manual_seed((self._start.worker_seed or 0) % WORKER_SEEDS)
        return DataLoader(
            dataset,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate_fn=_CollateShare(
                loader.collate_fn,
                self._dp if not self._num_workers else replace(self._dp, group=None),  # workers ask no other rank
                self._share,
                self._format,
                keeps_samples=self._keeps_samples,
                has_digest=self._readers.count > 1,
                reads_whole=self._reads_whole,
            ),
            pin_memory=loader.pin_memory,
            generator=self._generator,
            persistent_workers=loader.persistent_workers,
            **options,
        )

    def _cut(self, batch: object) -> Portion:
        if self._dp.size > 1 and (reason := why_no_batch(batch)):
            raise ValueError(f"the loader yields single samples, whose tokens would be split as rows: {reason}")
        arguments = batch if isinstance(batch, Mapping) else {"batch": batch}
        schema = BatchSchema(arguments, self._format)
        if not schema.tensors:
            raise ValueError(
                f"a batch of type {type(batch).__name__} holds no tensors to split over data-parallel ranks; if it is "
                "a single sample, wrap the samples: DataLoader(samples, batch_size=8)"
            )
        share = self._share(schema.rows, self._dp)
        if self._dp.size == 1:
            return Portion.of(share, batch, schema.rows)
        if self._needs_rows and (others := schema.without_rows()):
            raise PlanError(
                f"{others[0]} of a ready batch has something else along its first dim than the {schema.rows} rows, so "
                "the ranks' parts are no DTensor of the whole: pass output='local' to shard_dataloader"
            )
        try:
            own = schema.part(slice(share.low, share.high), take_rows)
        except PlanError as error:
            sizes = {name: len(x) for name, x in schema.tensors.items()}
            raise PlanError(
                f"the tensors of a batch have different numbers of rows, {sizes}, so the batch cannot be split over "
                f"data-parallel ranks: {error}. Or pass a DataLoader over samples, so that its collate function runs "
                "on each rank"
            ) from None
        return Portion.of(share, own if isinstance(batch, Mapping) else own["batch"], schema.rows)


def is_stock(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Return whether a loader is torch's DataLoader, or a subclass with the same ``__iter__``."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


@dataclass(frozen=True)
class Found:
    """What a batch in which a collate function drew random numbers has shown.

    Args:
        reads_whole: whether the rows of whole batches can be cut out.
        kind: the class of what the function returns.
    """

    reads_whole: bool
    kind: str


class _CollateShare:
    """Collates this rank's samples of a batch or, if that draws random numbers, all samples and cuts out its rows.

    Where this process collates every batch, the ranks tell each other in which batch one of them has drawn, and collate
    that one again, whole. A worker only tells its own rank. This is a class, not a closure, so that workers can
    unpickle it.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        dp: Axis,
        share: Sharing,
        format: BatchFormat | None,
        *,
        keeps_samples: bool,
        has_digest: bool,
        reads_whole: bool | None,
    ):
        self._whole, self._own = collate, KeepingSamples(collate) if keeps_samples else collate
        self._share, self._format, self._has_digest = share, format, has_digest
        self._dp, self._reads_whole = dp, reads_whole

    def __call__(self, samples: list[Any]) -> tuple[int, Portion, Found | None]:
        """Return a digest of the samples, this rank's portion, and what was found out if the function has drawn."""
        rows, found = len(samples), None
        share = self._share(rows, self._dp)
        code = digest(samples) if self._has_digest else 0
        if self._reads_whole:
            batch: Any = cut_rows(self._whole(samples), share, rows, self._format)
        elif self._reads_whole is None:
            batch, found = self._watched(samples, share)
        else:
            batch = self._own(samples[share.low : share.high])
        return code, portion_of(share, batch, rows), found

    def _watched(self, samples: list[Any], share: Share) -> tuple[Any, Found | None]:
        before = RandomStates(self._whole)
        batch = self._own([_kept(x) for x in samples[share.low : share.high]])
        if not has_drawn_on_any(not before.are_unchanged, self._dp):
            return batch, None
        before.restore()
        whole = self._whole([_kept(x) for x in samples])
        own = own_rows(whole, share, len(samples), self._format)
        self._reads_whole = own is not None
        if own is None:
            before.restore()
            own = self._own(samples[share.low : share.high])
        return own, Found(self._reads_whole, type(whole).__name__)


def _kept(sample: object) -> object:
    """Return a sample of which a collate function may take entries, and that is collated again."""
    return copy.copy(sample) if isinstance(sample, dict | list) else sample


class _After(IterableDataset[Any]):
    """A dataset without its first samples, which are read, and collated if that draws, as when the epoch began.

    Args:
        dataset: the dataset.
        samples: the number of samples to leave out.
        rows: how many of them were in each batch.
        collate: the collate function; None if it draws nothing.
        start: what the epoch began with.
    """

    def __init__(
        self, dataset: Iterable[Any], samples: int, rows: int, collate: Callable[..., Any] | None, start: EpochStart
    ):
        self._dataset, self._samples, self._rows = dataset, samples, rows
        self._collate, self._start = collate, start

    def __iter__(self) -> Iterator[Any]:
        with self._start.restored(if_any=self._samples):
            rest = iter(self._dataset)
            for low in range(0, self._samples, self._rows or 1):
                batch = list(islice(rest, min(self._rows, self._samples - low)))
                if self._collate is not None:
                    self._collate(batch)
        yield from rest
