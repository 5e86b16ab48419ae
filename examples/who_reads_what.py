"""Print which rank reads which sample with torch's DistributedSampler, accelerate and Meshwright.

torchrun --nproc-per-node 2 -m examples.who_reads_what

Every rank takes one sample per step from datasets of 1, 2 and 3 samples. If a loader repeats a sample, the sample
counts twice in the gradient. If it drops one, the model never learns it. If it gives the ranks different numbers of
steps, the rank with more steps waits for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import meshwright as mw
from examples.primitives.runs import launch
from meshwright.faults.together import values_of_all

SIZES = (1, 2, 3)


class Numbers(Dataset[int]):
    """A dataset whose sample k is the number k."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def torchs(dataset: Numbers, drop_last: bool) -> Iterable[Any]:
    sampler = DistributedSampler(dataset, shuffle=False, drop_last=drop_last)
    return DataLoader(dataset, batch_size=1, sampler=sampler, drop_last=drop_last)


def accelerates(dataset: Numbers, drop_last: bool) -> Iterable[Any]:
    loader = DataLoader(dataset, batch_size=1, drop_last=drop_last)
    world, rank = dist.get_world_size(), dist.get_rank()
    return prepare_data_loader(loader, torch.device("cpu"), world, rank, put_on_device=False)


def meshwrights(dataset: Numbers, drop_last: bool) -> Iterable[Any]:
    # The batch size of one device. The ranks split the batch, so each gets one sample.
    loader = DataLoader(dataset, batch_size=dist.get_world_size(), drop_last=drop_last)
    mesh = mw.ProcessMesh(range(dist.get_world_size()), ["dp"])
    return mw.shard_dataloader(loader, mesh, shard_dims="dp", output="local", spread=True)


def read(loader: Iterable[Any]) -> list[tuple[int, bool]]:
    """Return this rank's samples in order, and whether each counts."""
    return [(int(batch), getattr(loader, "weight", 1.0) > 0) for batch in loader]


def verdict(ranks: list[list[tuple[int, bool]]], size: int, drop_last: bool) -> str:
    counts = Counter(sample for samples in ranks for sample, counts in samples if counts)
    last = size // len(ranks) * len(ranks) if drop_last else size
    faults = [f"repeats {sample}" for sample, count in sorted(counts.items()) if count > 1]
    faults += [f"loses {sample}" for sample in range(last) if not counts[sample]]
    if len({len(samples) for samples in ranks}) > 1:
        faults.append("uneven steps")
    if dropped := list(range(last, size)):
        faults.append(f"drops {', '.join(map(str, dropped))}, as asked")
    return ", ".join(faults) or "each sample once"


def main() -> None:
    loaders = {"torch DistributedSampler": torchs, "accelerate": accelerates, "meshwright": meshwrights}
    names = [f"rank {rank}" for rank in range(dist.get_world_size())]
    table = Table("samples", "drop_last", "loader", *names, "", title="who reads what")
    for size in SIZES:
        for drop_last in (False, True):
            for name, make in loaders.items():
                ranks = values_of_all(read(make(Numbers(size), drop_last)))
                # In brackets: a repeated sample that counts in no loss, so that all ranks make the same steps.
                cells = [" ".join(str(s) if counts else f"({s})" for s, counts in samples) for samples in ranks]
                table.add_row(str(size), str(drop_last), name, *cells, verdict(ranks, size, drop_last))
        table.add_section()
    if dist.get_rank() == 0:
        Console(width=100).print(table)


if __name__ == "__main__":
    launch(main)
