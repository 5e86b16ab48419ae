"""``python -m benchmarks.loading``: compare the time per step of the mesh-aware loader with a plain DataLoader."""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from datasets import Dataset, disable_progress_bars
from torch.utils.data import DataLoader

import meshwright as mw
from harness.torchrun import torchrun
from meshwright.data.loader import DistributedLoader
from meshwright.data.nested import digest
from meshwright.data.peers import LoaderMesh, Peers, check_same_rows
from meshwright.mesh.axes import Axis
from meshwright_hf.datasets import TokenCollator, TokenRows

PROCESSES = 2
BATCH_SIZE, TOKENS = 32, 512
HUGE = 10**9


class Counted(torch.utils.data.Dataset[int]):
    """A dataset of any size that takes no memory."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def tokens(rows: int, folder: Path) -> Dataset:
    """Return a memory-mapped dataset on disk, as users have."""
    disable_progress_bars()
    ids = np.random.default_rng(0).integers(0, 32_000, (rows, TOKENS)).astype(np.int32)
    Dataset.from_dict({"input_ids": list(ids)}).save_to_disk(folder)
    return Dataset.load_from_disk(folder)


Contender = Callable[[], Iterable[Any]]


def ratios(plain: Contender, ours: Contender, rounds: int) -> tuple[float, list[float]]:
    """Return the plain loader's seconds per step, and ours / plain in each round; they take turns in a random order."""
    draw = random.Random(0)
    contenders = {"plain": plain, "ours": ours}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in draw.sample(sorted(contenders), len(contenders)):
            loader = contenders[name]()
            together()
            start = time.perf_counter()
            steps = sum(1 for _ in loader)
            together()  # with ours, ranks wait for each other; in training, they would with both loaders
            times[name].append((time.perf_counter() - start) / steps)
    return statistics.median(times["plain"]), [a / b for a, b in zip(times["ours"], times["plain"], strict=True)]


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


def row(name: str, plain: float, of_rounds: list[float]) -> str:
    of_rounds = sorted(of_rounds)
    spread = f"{statistics.median(of_rounds):.3f} ({of_rounds[0]:.3f}-{of_rounds[-1]:.3f})"
    added = plain * (statistics.median(of_rounds) - 1)
    return f"| {name} | {plain * 1e3:.2f} | {spread} | {added * 1e6:.0f} |"


def one_process(dataset: Dataset, rounds: int) -> Iterator[str]:
    for form in ("lists", "numpy", "TokenRows"):
        rows: Any = TokenRows(dataset) if form == "TokenRows" else dataset.with_format(form.replace("lists", "python"))
        for workers in (0, 1):
            for shuffle in (False, True):

                def make(rows: Any = rows, workers: int = workers, shuffle: bool = shuffle) -> DataLoader[Any]:
                    collate = TokenCollator()
                    return DataLoader(rows, BATCH_SIZE, shuffle, collate_fn=collate, num_workers=workers)

                def ours(make: Any = make) -> Iterable[Any]:
                    return DistributedLoader(make(), LoaderMesh(dp=Axis("dp")))

                name = f"1 process, {form}, {workers} workers{', shuffled' if shuffle else ''}"
                yield row(name, *ratios(make, ours, rounds))


def two_processes(dataset: Dataset, rounds: int) -> Iterator[str]:
    """Yield a row per mesh and output: with dp=2 each process reads half of the batch, with tp=2 the whole batch."""
    rows = dataset.with_format("numpy")
    meshes = {"dp=2": mw.ProcessMesh([[0], [1]], ["dp", "tp"]), "tp=2": mw.ProcessMesh([[0, 1]], ["dp", "tp"])}
    for name, mesh in meshes.items():
        for output in ("local", "dtensor"):

            def plain(own: int = BATCH_SIZE // mesh.shape[0]) -> Iterable[Any]:
                return DataLoader(rows, own, collate_fn=TokenCollator())

            def ours(mesh: mw.ProcessMesh = mesh, output: Any = output) -> Iterable[Any]:
                loader = DataLoader(rows, BATCH_SIZE, collate_fn=TokenCollator())
                return mw.shard_dataloader(loader, mesh, shard_dims="dp", output=output)

            yield row(f"{name}, {output} output", *ratios(plain, ours, rounds))


def digest_cost(dataset: Dataset) -> str:
    """Return the milliseconds of one comparison of rows between two processes."""
    batch = TokenCollator()(TokenRows(dataset).__getitems__(range(BATCH_SIZE)))
    world = Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    times = []
    for _ in range(50):
        dist.barrier()
        start = time.perf_counter()
        check_same_rows(Peers((world,)), 0, digest(batch), "benchmark")
        times.append(time.perf_counter() - start)
    return f"{statistics.median(times) * 1e3:.2f}"


def seek() -> Iterator[str]:
    """Yield the time and memory to resume at sample 10^8 of 10^9."""
    for shuffle in (False, True):
        user = DataLoader(Counted(HUGE), batch_size=32, shuffle=shuffle, collate_fn=list)
        first = DistributedLoader(user, LoaderMesh(dp=Axis("dp")))
        next(iter(first))
        state = {**first.state_dict(), "samples": 10**8}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        loader = DistributedLoader(user, LoaderMesh(dp=Axis("dp")))
        loader.load_state_dict(state)
        next(iter(loader))
        seconds = time.perf_counter() - start
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        order = "shuffled" if shuffle else "in order"
        yield f"| {order} | {seconds * 1e3:.1f} ms | {grown:.1f} MiB | {len(json.dumps(state))} bytes |"


@contextmanager
def as_rank() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def main(
    rows: Annotated[int, typer.Option(help="Rows of 512 tokens in the dataset.")] = 16_000,
    rounds: Annotated[int, typer.Option(help="Epochs of each contender; the contenders take turns.")] = 9,
) -> None:
    """Print the medians of ours / plain within a round, the cost of the digest, and the cost of seeking.

    Nothing is trained between the steps, so the ratio is that of the bare loops. The second table is for two
    processes of one thread each.
    """
    with tempfile.TemporaryDirectory() as folder:
        if "RANK" in os.environ:
            with as_rank():
                dataset = tokens(rows, Path(folder) / "rows")
                lines = [*two_processes(dataset, rounds), f"\none digest comparison: {digest_cost(dataset)} ms"]
                if dist.get_rank() == 0:
                    print("\n".join(lines))
            return
        torch.set_num_threads(1)
        print("| bare loop | plain, ms per step | ours / plain | added per step, µs |\n|---|---|---|---|")
        for line in one_process(tokens(rows, Path(folder) / "rows"), rounds):
            print(line, flush=True)
    if status := torchrun(PROCESSES, "benchmarks.loading", f"--rows={rows}", f"--rounds={rounds}"):
        raise typer.Exit(status)
    print("\n| resume at 10^8 of 10^9 samples | first batch after | added memory | state |\n|---|---|---|---|")
    for line in seek():
        print(line)


if __name__ == "__main__":
    typer.run(main)
