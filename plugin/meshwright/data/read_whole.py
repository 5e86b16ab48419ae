"""Reading what can only be gone through: every rank goes through all of it and keeps its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from meshwright.data.batches import Portion, Sharing
from meshwright.data.reading import VERSION, Position, check_state, worker_options
from meshwright.data.tree import map_tensors, tensors_of
from meshwright.parallel.collectives import Axis


class WholeReader:
    """Reads any iterable of batches, or a DataLoader over a dataset without numbered shards.

    A state is gone back to by reading up to there again. With workers the order depends on their number and on the
    batch size, which must then stay the same.

    Args:
        loader: the user's.
        dp: this rank's place among those that take different rows.
        share: which rows of a batch it takes.
    """

    def __init__(self, loader: Iterable[Any], dp: Axis, share: Sharing):
        self.position = Position()
        self.dropped = 0
        self._loader, self._dp, self._share = loader, dp, share
        self._batches = 0  # given out in this epoch
        self._cuts_samples = isinstance(loader, DataLoader) and bool(loader.batch_size)
        self._num_workers = getattr(loader, "num_workers", 0)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    @property
    def batch_size(self) -> int | None:
        return getattr(self._loader, "batch_size", None)

    def describe(self) -> dict[str, str]:
        return {"batch size": str(self.batch_size), "num_workers": str(self._num_workers)}

    def draw(self) -> list[Any]:
        return []

    def read(self, draws: list[Any]) -> Iterator[Portion]:
        position = self.position
        if not position.samples:
            self._batches = 0
        for portion in self._rest():
            position.samples += portion.total
            self._batches += 1
            yield portion
        position.finish()

    def set_epoch(self, epoch: int) -> None:
        self.position.set_epoch(epoch)
        dataset: Any = getattr(self._loader, "dataset", None)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "reader": "whole",
            "epoch": self.position.epoch,
            "samples": self.position.samples,
            "batches": self._batches if self.position.samples else 0,
            "dataset_epoch": getattr(getattr(self._loader, "dataset", None), "epoch", None),
            **self._settings(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, {"reader": "whole"}, "it is of another kind of dataset")
        check_state(state, self._settings(), "the order of a dataset without numbered shards depends on it")
        self.position.load(state)
        self._batches = state["batches"]
        if state["dataset_epoch"] is not None:
            self._loader.dataset.set_epoch(state["dataset_epoch"])  # type: ignore[attr-defined]

    def _settings(self) -> dict[str, Any]:
        is_elastic = self._cuts_samples and not self._num_workers
        return {"num_workers": self._num_workers, "batch_size": None if is_elastic else self.batch_size}

    def _rest(self) -> Iterator[Portion]:
        """The batches that follow the position."""
        if not self._cuts_samples:
            for batch in islice(self._loader, self._batches, None):
                yield self._cut(batch)
            return
        loader: Any = self._loader
        if loader.num_workers:
            yield from islice(self._sharing(loader.dataset), self._batches, None)
        else:
            yield from self._sharing(_After(loader.dataset, self.position.samples))

    def _sharing(self, dataset: Any) -> DataLoader[Any]:
        """The user's DataLoader, but that it collates this rank's samples only."""
        loader: Any = self._loader
        return DataLoader(
            dataset,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate_fn=_CollateShare(loader.collate_fn, self._dp, self._share),
            pin_memory=loader.pin_memory,
            generator=loader.generator,
            persistent_workers=loader.persistent_workers,
            **worker_options(loader),
        )

    def _cut(self, batch: Any) -> Portion:
        rows = _num_rows(batch)
        share = self._share(rows, self._dp)
        own = map_tensors(batch, lambda x: x[share.low : share.high] if x.ndim and x.shape[0] == rows else x)
        return Portion.of(share, own, rows)


class _Pinnable(Portion):
    """A portion whose tensors a DataLoader can pin."""

    def pin_memory(self) -> Portion:
        """What DataLoader calls on batches of its own types."""
        return replace(self, batch=map_tensors(self.batch, Tensor.pin_memory))


class _CollateShare:
    """Collates this rank's run of the samples of a batch; a class, so that workers can unpickle it."""

    def __init__(self, collate: Callable[[list[Any]], Any], dp: Axis, share: Sharing):
        self._collate, self._share = collate, share
        self._dp = Axis(dp.name, dp.size, dp.rank)  # a process group cannot be sent to a worker

    def __call__(self, samples: list[Any]) -> Portion:
        share = self._share(len(samples), self._dp)
        return _Pinnable.of(share, self._collate(samples[share.low : share.high]), len(samples))


class _After(IterableDataset[Any]):
    """The samples of a dataset that follow the first ones."""

    def __init__(self, dataset: Any, samples: int):
        self._dataset, self._samples = dataset, samples

    def __iter__(self) -> Iterator[Any]:
        return islice(self._dataset, self._samples, None)


def _num_rows(batch: Any) -> int:
    for tensor in tensors_of(batch):
        if tensor.ndim:
            return tensor.shape[0]
    raise ValueError(f"a batch of type {type(batch).__name__} holds no tensors to split over data-parallel ranks")
