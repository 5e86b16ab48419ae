"""Reading an iterable dataset whose shards can be shared out over ranks and workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from meshwright.data.batches import Portion, Sharing, chunk_share
from meshwright.data.reading import VERSION, Position, check_state, worker_options
from meshwright.data.shards import ShardedSource
from meshwright.data.stream import ShardedStream, gather_objects
from meshwright.data.tree import map_tensors
from meshwright.parallel.collectives import Axis

SHUFFLING_STAGE = "BufferShuffledExamplesIterable"  # of ``datasets``, whose buffer no state holds


class StreamReader:
    """Reads a ShardedStream and collates its rows.

    Args:
        loader: the user's, over a dataset with numbered shards.
        dp: this rank's place among those that read different rows.
        share: which rows of a batch it takes.
        options: of the ShardedStream: ``shuffle``, ``buffer_size``, ``seed``, ``lanes``.
    """

    def __init__(self, loader: DataLoader[Any], dp: Axis, share: Sharing, options: Mapping[str, Any]):
        assert loader.batch_size is not None
        self.position = Position()
        self._loader, self._dp, self._share = loader, dp, share
        self._stream = ShardedStream(
            loader.dataset,
            batch_size=loader.batch_size,
            dp=dp,
            drop_last=loader.drop_last,
            num_workers=loader.num_workers,
            loader_options=worker_options(loader),
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

    def draw(self) -> list[Any]:
        return []

    def read(self, draws: list[Any]) -> Iterator[Portion]:
        self._stream.set_epoch(self.position.epoch)
        for rows in self._stream:
            samples, counted = rows.samples, 0 if rows.is_blank else len(rows.samples)
            if self._share is chunk_share and rows.total % self._dp.size:
                samples = self._in_chunks(samples[:counted], rows.total)
                counted = len(samples)
            self.position.samples = self._stream.samples
            held = len(samples)
            yield Portion(self._collate(samples), rows.total, held, counted, is_whole=held == rows.total)
        self.position.finish()

    def set_epoch(self, epoch: int) -> None:
        self.position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        if self.position.is_fresh and self.position.epoch != self._stream.epoch:
            self._stream.set_epoch(self.position.epoch)
        place = {"epoch": self.position.epoch, "samples": self.position.samples}
        return {"version": VERSION, "reader": "stream", **place, "stream": self._stream.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, {"reader": "stream"}, "it is of another kind of dataset")
        self._stream.load_state_dict(state["stream"])
        self.position.load(state)

    def _in_chunks(self, samples: list[Any], total: int) -> list[Any]:
        """The rows of the last batch dealt out as DTensor has them."""
        everything = [sample for part in gather_objects(samples, self._dp) for sample in part]
        share = self._share(total, self._dp)
        return everything[share.low : share.high]

    def _collate(self, samples: list[Any]) -> Any:
        batch = self._loader.collate_fn(samples)
        if self._loader.pin_memory and torch.cuda.is_available():
            return map_tensors(batch, Tensor.pin_memory)
        return batch


def has_shards(loader: Any) -> bool:
    """Whether a loader's dataset can be read as a ShardedStream.

    A dataset of Hugging Face that ``dataset.shuffle()`` shuffles cannot, since no state holds that buffer, nor can
    one with a single shard.
    """
    if not isinstance(loader, DataLoader) or not loader.batch_size:
        return False
    dataset: Any = loader.dataset
    is_streamed = isinstance(loader.dataset, IterableDataset) and hasattr(dataset, "shard") and hasattr(dataset, "iter")
    return (
        (isinstance(dataset, ShardedSource) or is_streamed)
        and getattr(dataset, "num_shards", 1) > 1
        and not is_shuffled(dataset)
    )


def is_shuffled(dataset: Any) -> bool:
    """Whether ``dataset.shuffle()`` of ``datasets`` is somewhere in its pipeline."""
    stages = [getattr(dataset, "_ex_iterable", None)]
    while stages:
        stage = stages.pop()
        if stage is not None:
            if type(stage).__name__ == SHUFFLING_STAGE:
                return True
            stages += [getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())]
    return False
