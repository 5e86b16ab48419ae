"""The user's loader, split over the data-parallel axis.

The user's batch is the global batch. Ranks that differ only on the TP axis read the same rows; each
data-parallel rank reads its own run of every global batch, in the order of one device. A batch that
does not divide is split unevenly, which is exact because the loss counts tokens, not ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from meshwright.parallel.collectives import Axis, agree

IGNORE_INDEX = -100


class DistributedLoader:
    """Iterates this rank's rows of the user's batches, on this rank's device.

    Args:
        loader: a DataLoader, or any iterable of batches (those are read whole and cut).
        tp, dp: this rank's place; only ``dp`` decides the rows.
        device: where tensors go.
    """

    _is_accelerate_prepared = True  # accelerate's own mark for "leave this loader as it is"

    def __init__(self, loader: Iterable[Any], *, tp: Axis, dp: Axis, device: torch.device):
        self.user_loader, self.dp, self.device = loader, dp, device
        self._blanks: deque[bool] = deque()
        self._loader = self._split(loader, tp)

    def __iter__(self) -> Iterator[Any]:
        self._blanks.clear()
        for batch in self._loader:
            is_blank, own = self._own_rows(batch)
            yield to_device(_blank(own) if is_blank else own, self.device)

    def __len__(self) -> int:
        return len(self.user_loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in ("user_loader", "_loader"):  # not yet set: half-built or being unpickled
            raise AttributeError(name)
        return getattr(self.user_loader, name)

    def _split(self, loader: Iterable[Any], tp: Axis) -> Iterable[Any]:
        if not isinstance(loader, DataLoader) or (
            loader.batch_sampler is None and not isinstance(loader.dataset, IterableDataset)
        ):
            return loader
        common: dict[str, Any] = {
            name: getattr(loader, name)
            for name in (
                "num_workers",
                "pin_memory",
                "timeout",
                "worker_init_fn",
                "multiprocessing_context",
                "generator",
                "persistent_workers",
            )
        }
        if loader.num_workers:
            common["prefetch_factor"] = loader.prefetch_factor
        if isinstance(loader.dataset, IterableDataset):
            collate = _RankCollate(loader.collate_fn, self.dp.rank, self.dp.size)
            sizes: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            return DataLoader(loader.dataset, collate_fn=collate, **sizes, **common)
        sampler = _RankBatches(loader.batch_sampler, tp, self.dp, self.device, self._blanks)
        return DataLoader(loader.dataset, collate_fn=loader.collate_fn, batch_sampler=sampler, **common)

    def _own_rows(self, batch: Any) -> tuple[bool, Any]:
        if isinstance(batch, _RankRows):
            return batch.is_blank, batch.batch
        if self._loader is not self.user_loader:
            return self._blanks.popleft(), batch
        rows = _num_rows(batch)
        low, high, is_blank = _share(rows, self.dp.rank, self.dp.size)
        return is_blank, _map_tensors(batch, lambda x: x[low:high] if x.ndim and x.shape[0] == rows else x)


class _RankBatches:
    """This rank's run of indices of every batch of the user's batch sampler."""

    def __init__(self, batches: Any, tp: Axis, dp: Axis, device: torch.device, blanks: deque[bool]):
        self.batches, self.tp, self.dp, self.device, self.blanks = batches, tp, dp, device, blanks

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._agreed_batches():
            low, high, is_blank = _share(len(batch), self.dp.rank, self.dp.size)
            self.blanks.append(is_blank)
            yield batch[low:high]

    def _agreed_batches(self) -> Iterator[list[Any]]:
        """The first rank's order: ranks whose random states differ would read each other's rows."""
        sampler = getattr(self.batches, "sampler", None)
        if self.tp.size * self.dp.size == 1 or isinstance(sampler, SequentialSampler):
            yield from self.batches
        elif isinstance(sampler, RandomSampler):
            own = sampler.generator
            # What RandomSampler itself draws without a generator, so that one device's order results.
            seed = torch.empty((), dtype=torch.int64).random_(generator=own) if own is None else None
            state = own.get_state() if own is not None else seed
            agreed = agree(state.to(self.device), self.tp, self.dp).cpu()  # type: ignore[union-attr]
            if own is not None:
                own.set_state(agreed)
                yield from self.batches
                return
            sampler.generator = torch.Generator().manual_seed(int(agreed))
            try:
                yield from self.batches
            finally:
                sampler.generator = None
        else:
            yield from self._first_rank_batches(list(self.batches))

    def _first_rank_batches(self, batches: list[list[Any]]) -> list[list[Any]]:
        if not all(isinstance(index, int) for batch in batches for index in batch):
            return batches
        sizes = torch.tensor([len(batch) for batch in batches], dtype=torch.int64, device=self.device)
        indices = torch.tensor([i for batch in batches for i in batch], dtype=torch.int64, device=self.device)
        agreed = agree(indices, self.tp, self.dp).cpu()
        return [list(map(int, part)) for part in agreed.split(sizes.tolist())]


class _RankCollate:
    """Collates this rank's run of the samples of a batch; a class, so that workers can unpickle it."""

    def __init__(self, collate: Callable[[list[Any]], Any], rank: int, size: int):
        self.collate, self.rank, self.size = collate, rank, size

    def __call__(self, samples: list[Any]) -> _RankRows:
        low, high, is_blank = _share(len(samples), self.rank, self.size)
        return _RankRows(self.collate(samples[low:high]), is_blank)


class _RankRows:
    """A batch that is cut already."""

    def __init__(self, batch: Any, is_blank: bool):
        self.batch, self.is_blank = batch, is_blank

    def pin_memory(self) -> _RankRows:
        """What DataLoader calls on batches of its own types."""
        return _RankRows(_map_tensors(self.batch, Tensor.pin_memory), self.is_blank)


def _share(rows: int, rank: int, size: int) -> tuple[int, int, bool]:
    """A rank's run of rows; one that would have none gets a row that does not count."""
    low, high = rank * rows // size, (rank + 1) * rows // size
    if low == high:
        return min(low, rows - 1), min(low, rows - 1) + 1, True
    return low, high, False


def _blank(batch: Any) -> Any:
    if not isinstance(batch, Mapping) or "labels" not in batch:
        raise ValueError(
            "the last batch has fewer rows than there are data-parallel ranks, and a batch without 'labels' "
            "cannot be padded with a row that does not count; set drop_last=True on the loader"
        )
    out = dict(batch)
    for name in ("labels", "shift_labels"):
        if name in out:
            out[name] = torch.full_like(out[name], IGNORE_INDEX)
    return out


def _num_rows(batch: Any) -> int:
    sizes: list[int] = []
    _map_tensors(batch, lambda x: sizes.append(x.shape[0]) if x.ndim else None)
    if not sizes:
        raise ValueError(f"a batch of type {type(batch).__name__} holds no tensors to split over data-parallel ranks")
    return sizes[0]


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``."""
    return _map_tensors(batch, lambda x: x.to(device, non_blocking=True))


def _map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(item, function) for item in value)
    return value
