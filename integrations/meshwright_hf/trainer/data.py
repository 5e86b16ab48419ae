"""The Trainer's loaders on the mesh, for training, for evaluation (each row once) and for resuming in mid-epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any

import torch
from accelerate.state import GradientState
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from meshwright.data.global_batches import Portion
from meshwright.data.loader import DistributedLoader, made_together, without_labels
from meshwright.data.nested import map_tensors
from meshwright.data.peers import LoaderMesh
from meshwright.mesh.axes import Axis
from meshwright.optim.runtime import Runtime
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.share import BatchShare, yield_next
from meshwright.plan.loader_options import LoaderOptions
from meshwright_hf.batches import (
    batch_size_of,
    gather_tensors,
    gather_values,
    global_batches,
    has_only_tensors,
    one_ahead,
    order_by_seed_and_epoch,
    seed_workers_alike,
)


def mesh_loader(
    loader: DataLoader[Any],
    runtime: Runtime,
    args: TrainingArguments,
    *,
    options: LoaderOptions,
    is_training: bool,
    has_seedable_sampler: bool,
) -> DistributedLoader:
    """Return a loader of this rank's rows of global batches, for a Trainer's loader of one dp rank's batches.

    The order is the order of the same loader under accelerate on one process.

    Args:
        loader: the loader as the Trainer built it.
        runtime: the model's runtime.
        args: the Trainer's arguments, which give the device of the batches and the seed of the shuffling (default:
            torch's).
        options: the options of reading.
        is_training: False for evaluation, where rows that only keep a rank in step must not be seen.
        has_seedable_sampler: whether to shuffle by a seed and the epoch, as accelerate does; otherwise as torch does.

    Raises:
        ValueError: on every rank, if the loader's batches cannot be joined to global batches.
    """

    def make() -> DistributedLoader:
        batches = global_batches(loader, runtime.mesh.dp.size)
        seed_workers_alike(batches)
        sampler = getattr(batches.batch_sampler, "sampler", None)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size *= runtime.mesh.dp.size  # groups of similar length must be groups of global batches
        elif has_seedable_sampler:
            order_by_seed_and_epoch(batches, args.data_seed)
        mesh = LoaderMesh.of(runtime.mesh, args.device)
        format = runtime.features.find(BatchFormat)
        if is_training:
            return TrainingLoader(batches, mesh, options=options, format=format)
        return EvaluationLoader(batches, mesh, options=options, blanks="either", format=format)

    return made_together(make)


class TrainingLoader(DistributedLoader):
    """Reads one batch ahead, as accelerate's loader does, so that a collate function draws in the order of one device.

    A checkpoint, and an evaluation in mid-epoch, so find the random states after the draws for the batch that follows.
    """

    _place: dict[str, Any] | None = None  # after the yielded batch

    def __iter__(self) -> Iterator[Any]:
        for batch, (place, share), _ in one_ahead(super().__iter__(), self._look):
            self._place = place
            yield_next(share)
            yield batch
        self._place = None

    def _look(self) -> tuple[dict[str, Any], BatchShare | None]:
        return super().place(), self.share

    def place(self) -> dict[str, Any]:
        return super().place() if self._place is None else self._place

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._place = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._place = None


class EvaluationLoader(DistributedLoader):
    """Sets in accelerate's state what each batch is of the global batch, and whether it is the last batch."""

    yielded: BatchShare | None = None
    end_of_dataloader = False
    remainder = -1

    def __iter__(self) -> Iterator[Any]:
        state = GradientState()
        state._add_dataloader(self)
        try:
            read = one_ahead(super().__iter__(), lambda: self.share)
            for batch, self.yielded, self.end_of_dataloader in read:
                yield_next(self.yielded)
                yield batch
        finally:
            state._remove_dataloader(self)

    def _in_step(self, portion: Portion) -> Any:
        return without_labels(portion.batch) if portion.is_blank else portion.batch


def evaluated_rows() -> int | None:
    """Return how many rows of this rank's evaluation batch count; None outside an evaluation."""
    active = GradientState().active_dataloader
    return active.yielded.counted if isinstance(active, EvaluationLoader) and active.yielded is not None else None


def _rows_to_keep() -> int | None:
    """Return how many rows a gathered tensor has of this rank; None for all, which may be more than the samples.

    Of a batch that is not full, the Trainer gathers the loss once for each row of a full one, and accelerate cuts that.
    """
    active, rows = GradientState().active_dataloader, evaluated_rows()
    return None if rows and active.yielded.total >= (batch_size_of(active) or 0) else rows


def gather_rows(
    data: object, dp: Axis, *, as_objects: bool = False, is_cut: bool = True, is_of_rows: bool = True
) -> Any:
    """Return the rows of all data-parallel ranks in order, each once, as ``gather_for_metrics`` does.

    Args:
        data: tensors with rows, or numbers, in any nesting.
        dp: the axis over which ranks have different rows.
        as_objects: whether to send Python objects, e.g. because the other dims differ between ranks.
        is_cut: whether to cut tensors to the batch's rows that count; False for tensors with other numbers of rows.
        is_of_rows: whether a rank without rows has none of the data, if tensors are not cut.
    """
    rows = _rows_to_keep()
    if not is_cut:
        return gather_tensors(data, dp, is_blank=rows == 0 and is_of_rows)
    if as_objects or not has_only_tensors(data):
        own = data[:rows] if hasattr(data, "__getitem__") and not isinstance(data, dict) else [data]
        return gather_values(own, dp)
    return gather_tensors(map_tensors(data, lambda x: x[:rows] if x.ndim else x), dp)


def rest_of_epoch(
    loader: DistributedLoader, state: dict[str, Any] | None, *, draws: Tensor, skipped: int
) -> DataLoader[Any]:
    """Return a loader that resumes at the checkpoint's position after the Trainer skips its first ``skipped`` batches.

    The Trainer passes its loader to accelerate's ``skip_first_batches``. For a loader of an unknown class, this
    function reads and drops the batches. So the returned loader yields placeholders to drop, and then the batches from
    the saved position. The Trainer restores the checkpoint's random states once it has read the first step's batches.
    So a collate function draws these from the states at this call, as on one device.

    Args:
        loader: the epoch's loader.
        state: the loader's state when the checkpoint was saved; None for a checkpoint of the stock Trainer.
        draws: torch's random state when the epoch began, for a dataset that is read again from there.
        skipped: the number of batches that the Trainer skips.
    """
    now, rows = torch.get_rng_state(), batch_size_of(loader)
    if state is not None:
        loader.load_state_dict(state)
    samples = loader.position.samples if state is not None else rows and skipped * rows
    is_there = samples is not None and loader.skip(samples)
    placeholders = skipped if is_there or state is not None else 0
    return DataLoader(_Rest(loader, now if is_there else draws, placeholders), batch_size=None, collate_fn=_unchanged)


class _Rest(IterableDataset[Any]):
    def __init__(self, loader: DistributedLoader, draws: Tensor, placeholders: int):
        self._loader, self._draws, self._placeholders = loader, draws, placeholders

    def __iter__(self) -> Iterator[Any]:
        yield from repeat(None, self._placeholders)
        torch.set_rng_state(self._draws)
        yield from self._loader


def _unchanged(batch: object) -> Any:
    return batch
