"""The batches of one data-parallel rank and the global batch: loaders are converted to it, and rows for metrics are
gathered from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from transformers import DefaultDataCollator, default_data_collator
from transformers.trainer_utils import seed_worker

from meshwright.data.nested import map_tensors, tensors_of
from meshwright.data.one_length import STACKING
from meshwright.data.readers.base import worker_options
from meshwright.data.stream import gather_objects
from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import all_gather

STACKING.extend((default_data_collator, DefaultDataCollator))

T = TypeVar("T")
S = TypeVar("S")


def global_batches(loader: DataLoader[Any], dp: int) -> DataLoader[Any]:
    """Return a loader with batches that are dp times as large: the batches of all data-parallel ranks joined.

    ``to_distributed`` and ``shard_dataloader`` take global batches and give each rank its rows, so each rank again gets
    as many rows as a batch of ``loader`` has. Dataset, order, collate function, workers, ``drop_last`` and pinned
    memory stay the same. dp successive batches of a batch sampler become one batch.

    Args:
        loader: a loader of one rank's batches, over a map-style or iterable dataset.
        dp: the number of ranks that read different rows.

    Raises:
        ValueError: if ``loader`` is not a plain DataLoader, or has ``batch_size=None``, so that its batches cannot be
            joined.

    Example:
        >>> [batch.tolist() for batch in global_batches(DataLoader(range(5), batch_size=2), dp=2)]
        [[0, 1, 2, 3], [4]]
    """
    if dp == 1:
        return loader
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        raise ValueError(
            f"a {type(loader).__name__} makes its batches in a way of its own, so {dp} of them cannot become a "
            "global batch; pass a torch.utils.data.DataLoader, or make the batches global yourself "
            "(Accelerator(split_batches=True), or meshwright.to_distributed)"
        )
    options = worker_options(loader)
    options |= {
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "persistent_workers": loader.persistent_workers,
        "generator": loader.generator,
        "in_order": loader.in_order,
    }
    if loader.batch_size is not None:
        options |= {"batch_size": loader.batch_size * dp, "drop_last": loader.drop_last}
        if not isinstance(loader.dataset, IterableDataset):
            options["sampler"] = loader.sampler
        return DataLoader(loader.dataset, **options)
    if loader.batch_sampler is None:
        raise ValueError(
            f"the loader has batch_size=None: its batches are items of the dataset, and {dp} of them cannot become a "
            "global batch; give it a batch_size, or make each item a global batch and pass "
            "Accelerator(split_batches=True)"
        )
    return DataLoader(loader.dataset, batch_sampler=_Joined(loader.batch_sampler, dp), **options)


def seed_workers_alike(loader: DataLoader[Any]) -> None:
    """Let the Trainer seed a loader's workers, in place, as on its first rank: the reader gives each rank its seed."""
    init = loader.worker_init_fn
    if isinstance(init, partial) and init.func is seed_worker:
        loader.worker_init_fn = partial(seed_worker, num_workers=loader.num_workers, rank=0)


def order_by_seed_and_epoch(loader: DataLoader[Any], data_seed: int | None) -> None:
    """Make the order of a shuffled loader depend only on seed and epoch, as accelerate's ``use_seedable_sampler`` does.

    Args:
        loader: the loader, changed in place if it has a RandomSampler.
        data_seed: the seed; None for torch's initial seed.
    """
    batch_sampler: Any = loader.batch_sampler
    sampler = getattr(batch_sampler, "sampler", None)
    if type(sampler) is RandomSampler:
        batch_sampler.sampler = SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            generator=sampler.generator,
            data_seed=data_seed,
        )


def batch_size_of(loader: Any) -> int | None:
    """Return the rows of a loader's batches; None if they have no fixed number."""
    size: int | None = getattr(loader, "batch_size", None)
    return size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)


def one_ahead(batches: Iterator[T], look: Callable[[], S]) -> Iterator[tuple[T, S, bool]]:
    """Yield each batch, what ``look`` returned after it was read, and whether it is the last.

    The next batch is read before this one is yielded.
    """
    batch = next(batches, None)
    while batch is not None:
        seen = look()
        following = next(batches, None)
        yield batch, seen, following is None
        batch = following


class _Joined:
    """A batch sampler that joins successive batches of another one, and has the other attributes of that sampler.

    If the sampler drops its own last batch, an incomplete joined batch at the end is left out as well.
    """

    def __init__(self, batch_sampler: Any, count: int):
        self.inner, self.count = batch_sampler, count

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self.inner)
        while group := list(islice(batches, self.count)):
            if len(group) == self.count or not self._drops_last:
                yield list(chain.from_iterable(group))

    def __len__(self) -> int:
        batches = len(self.inner)
        return batches // self.count if self._drops_last else -(-batches // self.count)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # being unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def batch_size(self) -> int | None:
        """The rows of a joined batch; None if the inner batches have no fixed size."""
        size = getattr(self.inner, "batch_size", None)
        return None if size is None else size * self.count

    @property
    def _drops_last(self) -> bool:
        return bool(getattr(self.inner, "drop_last", False))


def gather_tensors(data: object, dp: Axis, *, is_blank: bool = False, rows: int | None = None) -> Any:
    """Return each tensor with its rows gathered over the data-parallel axis; every rank makes the call.

    The ranks may have different numbers of rows. A tensor without dims becomes a vector with one number per rank.

    Args:
        data: a tensor, or nested containers of tensors, with the same structure on all ranks.
        dp: the data-parallel axis, whose ranks have different rows.
        is_blank: whether this rank's rows are a copy that does not count, because the batch has no row for this rank.
        rows: the number of rows to keep from the gathered rows; None for all.

    Raises:
        ValueError: on all ranks, if tensors differ between ranks in more than their number of rows.
    """
    own = list(tensors_of(data))
    if dp.size == 1:
        return map_tensors(data, lambda x: x[None] if x.ndim == 0 else x[:rows])
    forms = gather_objects([(str(x.dtype), tuple(x.shape), is_blank) for x in own], dp)
    if len({len(ranks) for ranks in forms}) > 1:
        raise ValueError(f"the ranks gather different numbers of tensors: {', '.join(str(len(r)) for r in forms)}")
    gathered = [_join(x, list(ranks), dp, rows) for x, *ranks in zip(own, *forms, strict=True)]
    joined = iter(gathered)
    return map_tensors(data, lambda _: next(joined))


def gather_values(data: Iterable[object], dp: Axis, *, is_blank: bool = False, rows: int | None = None) -> list[Any]:
    """Return the lists of all data-parallel ranks as one list; the items must be picklable. See ``gather_tensors``."""
    ranks = gather_objects([] if is_blank else list(data), dp)
    return [value for values in ranks for value in values][:rows]


def has_only_tensors(data: object) -> bool:
    """Return whether nested containers hold only tensors."""
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _join(x: Tensor, forms: list[tuple[str, tuple[int, ...], bool]], dp: Axis, rows: int | None) -> Tensor:
    if len({(dtype, shape[1:], len(shape)) for dtype, shape, _ in forms}) > 1:
        have = "; ".join(f"{dtype} {list(shape)} on rank {rank} of dp" for rank, (dtype, shape, _) in enumerate(forms))
        raise ValueError(
            f"tensors to gather may differ in their rows only, but there are {have}; pad them first, with "
            "accelerator.pad_across_processes(tensor, dim=1, pad_index=...)"
        )
    if x.ndim == 0:
        return all_gather(x.detach()[None], dp)
    most = max(shape[0] for _, shape, _ in forms)
    padded = x.new_zeros((most, *x.shape[1:]))
    padded[: x.shape[0]] = x
    parts = all_gather(padded.detach(), dp).split(most)
    kept = [part[: 0 if is_blank else shape[0]] for part, (_, shape, is_blank) in zip(parts, forms, strict=True)]
    return torch.cat(kept)[:rows]
