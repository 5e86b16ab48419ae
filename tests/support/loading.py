"""Ranks that read, one after another in one process, and datasets that say what was read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from meshwright.data.loader import DistributedLoader
from meshwright.data.peers import LoaderMesh, Peers
from meshwright.mesh.axes import Axis
from meshwright.plan.loader_options import LoaderOptions


class Numbers(Dataset[int]):
    """Sample k is k."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def as_list(samples: list[int]) -> list[int]:
    return samples


def plain(size: int, batch_size: int, *, shuffle: bool = False, seed: int = 0, **options: Any) -> DataLoader[Any]:
    """A one-device loader of numbers; a seed makes its shuffling that of every rank."""
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        Numbers(size), batch_size=batch_size, shuffle=shuffle, generator=generator, collate_fn=as_list, **options
    )


def ranks_of(dp: int, make: Any, options: LoaderOptions | None = None) -> list[DistributedLoader]:
    """The loaders of all data-parallel ranks; they agree on nothing, so that ``make`` must be seeded."""
    return [
        DistributedLoader(
            make(),
            LoaderMesh(dp=Axis("dp", size=dp, rank=rank), everyone=Peers()),
            blanks="weighted",
            options=options,
        )
        for rank in range(dp)
    ]


def steps(loaders: Sequence[DistributedLoader], limit: int | None = None) -> list[list[list[int]]]:
    """For each step, the samples that count on each rank; all ranks must take the same number of steps.

    Leaves all of them in mid-epoch after ``limit`` steps.
    """
    iterators = [iter(loader) for loader in loaders]
    taken: list[list[list[int]]] = []
    while limit is None or len(taken) < limit:
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            assert all(batch is None for batch in batches), "some ranks go on"
            break
        assert all(batches), "an empty batch, or a rank that is done before others"
        taken.append([batch if loader.weight else [] for loader, batch in zip(loaders, batches, strict=True)])
    return taken


def seen(taken: list[list[list[int]]]) -> list[list[int]]:
    """The global batches: the ranks' rows in order."""
    return [[sample for samples in batch for sample in samples] for batch in taken]
