"""Reads a dataset that can only be iterated. Every rank reads the whole dataset and keeps its own rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, TypeGuard

from torch import Generator
from torch.utils.data import DataLoader, Dataset

from meshwright.data.collation_trial import CollationTrial, Trials, Verdict, cut_rows
from meshwright.data.fingerprint import fingerprint, outline
from meshwright.data.global_batches import Portion, Sharing
from meshwright.data.nested import digest, take_rows, why_no_batch
from meshwright.data.one_length import KeepingSamples, portion_of
from meshwright.data.peers import Peers, check_same_rows
from meshwright.data.readers.base import (
    MOST_EPOCHS,
    NAMED,
    WORKER_SEEDS,
    Position,
    Reader,
    StateForm,
)
from meshwright.data.readers.map_style import After, WorkerStart, count_tried, loader_of
from meshwright.data.shards import name_of, reading
from meshwright.data.shuffling import Draws, WorkerSeeds
from meshwright.errors import PlanError
from meshwright.mesh.axes import Axis
from meshwright.outside_files import integer, maybe
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.mixed_rows import FixedInputs
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.plan.loader_options import DrawsOf
from meshwright.random_states import RandomStates
from meshwright.temporarily import temporarily

logger = logging.getLogger(__name__)

ENDED = -1
_UNLIKE = (
    "The dataset may give each process a part of its own (webdataset's split_by_node, a library that reads RANK or "
    "torch.distributed), or draw random numbers, or not every rank loaded the state. Let every process read all "
    "samples in one order: without a split by node, and seeded alike. For a dataset that stays split, call "
    "shard_dataloader(..., is_dataset_splitted=True)"
)
_NONE = object()  # in place of a batch after the last


class WholeReader(Reader):
    """Reads any iterable of batches, or a DataLoader over a dataset without numbered shards.

    Only the data itself can show that the ranks read the same rows, so the ranks compare a digest of each batch.
    Resuming reads the dataset again up to the saved position. With several workers, the order depends on their number
    and on the batch size, so a resumed run must not change them.

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
        self._trials = Trials(count_tried(loader, dp, draws) if isinstance(loader, DataLoader) else 0, format)
        self._worker_seed, self._fixed = 0, FixedInputs("Each data-parallel rank")

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
        return Draws() if self._worker_seeds is None else self._worker_seeds.draws(self.position.samples)

    def read(self, draws: Draws) -> Iterator[Portion]:
        position = self.position
        self._worker_seed = draws.worker_seed
        self._generator.manual_seed(draws.worker_seed % WORKER_SEEDS)
        if not position.samples:
            self._batches = 0
        rest = self._rest()
        while True:
            code, portion = next(rest, (ENDED, None))
            if self._readers.count > 1:
                where = f"epoch {position.epoch}, batch {self._batches} of a dataset that every rank reads whole"
                check_same_rows(self._readers, 0, code, where, _UNLIKE)
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
        return {
            **self.position.state("whole"),
            "batches": self._batches if self.position.samples else 0,
            "dataset_epoch": self._told,
            "dataset": self._fingerprint,
            **self._settings(),
        }

    def form_of(self, state: Mapping[str, Any]) -> StateForm:
        settings = self._settings()
        if self._cuts_samples and state.get("num_workers") == 1:  # of a version that told one worker from none
            settings = {"num_workers": 1, "batch_size": state.get("batch_size")}
        return StateForm(
            equal={
                f"the state is of another dataset. {NAMED}": {"reader": "whole", "dataset": self._fingerprint},
                "the order of a dataset that is iterated depends on it": settings,
            },
            fields={"batches": integer(), "dataset_epoch": maybe(integer(0, MOST_EPOCHS))},
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position.load(state)
        self._batches = state["batches"]
        if state["dataset_epoch"] is not None:
            self._tell(state["dataset_epoch"])

    def _tell(self, epoch: int) -> None:
        if callable(tell := getattr(self._dataset, "set_epoch", None)):
            tell(epoch)
            self._told = epoch

    def _settings(self) -> dict[str, Any]:
        if self._cuts_samples and not self._has_several_workers:
            return {"num_workers": 0, "batch_size": None}
        return {"num_workers": self._num_workers, "batch_size": self.batch_size}

    @property
    def _has_several_workers(self) -> bool:
        """Whether workers take turns, each with a batch of its part of the dataset."""
        return self._num_workers > 1

    def _rest(self) -> Iterator[tuple[int, Portion]]:
        """Yield for each batch after the position a digest of the whole batch, and this rank's portion."""
        if not self._cuts_samples:
            # All ranks must get a batch in the same step, so workers' batches come in order.
            is_unordered = not getattr(self._loader, "in_order", True)
            in_order = temporarily(self._loader, in_order=True) if is_unordered else nullcontext()
            with reading(self._where), in_order:
                rest = islice(self._loader, self._batches, None)
            for batch in self._read(rest):
                yield digest(batch) if self._readers.count > 1 else 0, self._cut(batch)
            return
        if self._has_several_workers:
            shares = self._read(islice(self._sharing(self._dataset), self._batches, None))
        else:
            shares = self._read(self._sharing(After(self._dataset, self.position.samples)))
        for code, portion, verdict in shares:
            if verdict is not None:
                self._trials.take(verdict, is_told=self._dp.rank == 0)
            yield code, portion

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
        start = WorkerStart(loader.worker_init_fn)
        start.seed = self._worker_seed
        return loader_of(
            loader,
            dataset,
            start,
            self._generator,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate_fn=_CollateShare(
                loader.collate_fn,
                self._dp,
                self._share,
                replace(self._trials),
                keeps_samples=self._keeps_samples,
                has_digest=self._readers.count > 1,
            ),
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
        self._fixed.see(schema)
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


class _CollateShare:
    """Collates this rank's samples of a batch or, if a trial shows that it must, all samples, and cuts out its rows.

    Each process that collates tries its first batches. This is a class, not a closure, so that workers can unpickle it.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        dp: Axis,
        share: Sharing,
        trials: Trials,
        *,
        keeps_samples: bool,
        has_digest: bool,
    ):
        self._whole, self._own = collate, KeepingSamples(collate) if keeps_samples else collate
        self._share, self._has_digest = share, has_digest
        self._dp = Axis(dp.name, dp.size, dp.rank)  # a process group cannot be sent to a worker
        self._trial, self._trials = CollationTrial(collate, dp, share, keeps_samples=keeps_samples), trials

    def __call__(self, samples: list[Any]) -> tuple[int, Portion, Verdict | None]:
        """Return a digest of the samples, this rank's portion, and what follows from a trial, if there was one."""
        rows, code = len(samples), digest(samples) if self._has_digest else 0
        share, trials, verdict = self._share(rows, self._dp), self._trials, None
        if trials.reads_whole:
            batch: Any = cut_rows(self._whole(samples), share, rows, trials.format)
        elif trials.left > 0:
            alone, finding = self._trial.of(samples, rows, RandomStates(self._whole))
            batch, verdict = trials.settle(alone, finding, share, rows, self._dp.size)
            trials.take(verdict, is_told=False)
        else:
            batch = self._own(samples[share.low : share.high])
        return code, portion_of(share, batch, rows), verdict
