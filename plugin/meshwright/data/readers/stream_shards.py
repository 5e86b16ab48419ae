"""Reads an iterable dataset whose shards can be spread over ranks and workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, IterableDataset

from meshwright.data.global_batches import Portion, Sharing, chunk_share
from meshwright.data.nested import map_tensors
from meshwright.data.readers.base import WORKER_SEEDS, Position, Reader, StateForm, worker_options
from meshwright.data.readers.whole_stream import is_stock
from meshwright.data.shards import ShardedSource, located, name_of, reading
from meshwright.data.shuffling import Draws, WorkerSeeds
from meshwright.data.stream import ShardedStream, StreamRows, gather_objects
from meshwright.mesh.axes import Axis
from meshwright.outside_files import anything, table
from meshwright.random_states import RandomStates

logger = logging.getLogger(__name__)

# The pipeline stages of ``datasets`` that process each row, or each batch of a shard's rows, independently.
STAGES_BY_ROW = {
    "ExamplesIterable",
    "ArrowExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable",
    "MappedExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
}

LANE_READER = "stream"  # what a state calls this reader

DRAWS_BY_RANK = (
    "the collate function draws random numbers, and each rank collates its own rows of the lanes. So the numbers "
    "differ from those of one device. Set LoaderOptions(order='loader'), or draw from a generator that is seeded by "
    "what is in the sample"
)


class StreamReader(Reader):
    """Reads a ShardedStream and collates its rows.

    Args:
        loader: the user's loader, over a dataset with numbered shards.
        dp: the axis along which ranks read different rows.
        share: the function that chooses a rank's rows of a batch.
        options: options of the ShardedStream: ``shuffle``, ``buffer_size``, ``seed``, ``lanes``.
    """

    def __init__(self, loader: DataLoader[Any], dp: Axis, share: Sharing, options: Mapping[str, Any]):
        assert loader.batch_size is not None
        self.position = Position()
        self._loader, self._dp, self._share = loader, dp, share
        self._worker_seeds, self._generator = WorkerSeeds.of(loader), Generator()
        self._is_watched = dp.size == 1  # whether it is known that the collate function draws random numbers
        self._stream = ShardedStream(
            loader.dataset,
            batch_size=loader.batch_size,
            dp=dp,
            drop_last=loader.drop_last,
            num_workers=loader.num_workers,
            loader_options={**worker_options(loader), "generator": self._generator},
            **options,
        )

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def batch_size(self) -> int:
        return self._stream.batch_size

    @property
    def dropped(self) -> int:
        return self._stream.dropped

    def describe(self) -> dict[str, str]:
        order = {name: value for name, value in self._stream.state_dict().items() if name != "lanes"}
        return {"stream": str(order), "batch size": str(self.batch_size), "drop_last": str(self._stream.drop_last)}

    def draw(self) -> Draws:
        """Draw a worker seed as a DataLoader does, so that loaders with the same random state keep their order."""
        return self._worker_seeds.draws(self.position.samples)

    def read(self, draws: Draws) -> Iterator[Portion]:
        self._generator.manual_seed((draws.worker_seed + self._dp.rank) % WORKER_SEEDS)
        self._stream.set_epoch(self.position.epoch)
        for rows in self._rows():
            samples, counted = rows.samples, 0 if rows.is_blank else len(rows.samples)
            if self._share is chunk_share and rows.total % self._dp.size:
                samples = self._in_chunks(samples[:counted], rows.total)
                counted = len(samples)
            start, self.position.samples = self.position.samples, self._stream.samples
            held = len(samples)
            with reading(partial(self._where, f"samples {start} to {start + rows.total - 1}")):
                batch = self._collate(samples)
            yield Portion(batch, rows.total, held, counted, is_whole=held == rows.total, samples=samples)
        self.position.finish()

    def _rows(self) -> Iterator[StreamRows]:
        try:
            yield from self._stream
        except Exception as error:
            if error is not self._stream.failure:
                raise
            raise located(error, self._where(f"the samples from {self.position.samples} on")) from error

    def _where(self, samples: str) -> str:
        return f"{samples} of epoch {self.position.epoch} of {name_of(self._loader.dataset)}"

    def set_epoch(self, epoch: int) -> None:
        self.position.set_epoch(epoch)
        self._stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        if self.position.is_fresh and self.position.epoch != self._stream.epoch:
            self._stream.set_epoch(self.position.epoch)
        return {**self.position.state(LANE_READER), "stream": self._stream.state_dict()}

    def form_of(self, state: Mapping[str, Any]) -> StateForm:
        why = "the state is of another kind of dataset"
        return StateForm(equal={why: {"reader": LANE_READER}}, fields={"stream": table(anything)})

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        self._stream.check_state(state["stream"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state["stream"])
        self.position.load(state)

    def _in_chunks(self, samples: list[Any], total: int) -> list[Any]:
        """Return this rank's rows of the last batch, divided over the ranks as in a DTensor."""
        everything = [sample for part in gather_objects(samples, self._dp) for sample in part]
        share = self._share(total, self._dp)
        return everything[share.low : share.high]

    def _collate(self, samples: list[Any]) -> Any:
        before = None if self._is_watched else RandomStates(self._loader.collate_fn)
        batch = self._loader.collate_fn(samples)
        if before is not None and not before.are_unchanged and self._dp.rank == 0:
            logger.warning(DRAWS_BY_RANK)
        self._is_watched = True
        if self._loader.pin_memory and torch.accelerator.is_available():
            return map_tensors(batch, Tensor.pin_memory)
        return batch


def has_lanes(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Return whether a loader's dataset has several shards, and rows that do not depend on other shards."""
    if not is_stock(loader) or not loader.batch_size:
        return False
    return has_shards(loader.dataset) and stage_over_shards(loader.dataset) is None


def has_shards(dataset: Any) -> bool:
    """Return whether a dataset has several numbered shards."""
    is_streamed = isinstance(dataset, IterableDataset) and hasattr(dataset, "shard") and hasattr(dataset, "iter")
    return (isinstance(dataset, ShardedSource) or is_streamed) and getattr(dataset, "num_shards", 1) > 1


def stage_over_shards(dataset: object) -> str | None:
    """Return the stage of a Hugging Face pipeline that would yield other rows if it ran on each shard separately.

    Return None if there is no such stage. ``take``, ``skip`` and functions with indices count rows over all shards.
    ``shuffle`` has a buffer that is in no state. Interleaving draws from several datasets.
    """
    stages = [getattr(dataset, "_ex_iterable", None)]
    while stages:
        stage: object = stages.pop()
        if stage is None:
            continue
        name = type(stage).__name__
        if getattr(stage, "with_indices", False) or getattr(stage, "drop_last_batch", False):
            return f"{name} with indices or drop_last_batch"
        if name not in STAGES_BY_ROW:
            return name
        stages += [getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())]
    return None
