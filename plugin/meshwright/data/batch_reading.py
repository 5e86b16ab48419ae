"""Reads and collates the batches of a map-style dataset, in the main process or in a DataLoader's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info

from meshwright.data.collation import Collate
from meshwright.data.collation_trial import TRIED, CollationTrial, RowsFinding
from meshwright.data.global_batches import Share
from meshwright.data.one_length import only_stacks
from meshwright.mesh.axes import Axis
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
