"""``python -m benchmarks.streaming``: time a step of a stream and of a plain DataLoader over the same dataset."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from datasets import Dataset
from torch.utils.data import DataLoader

from meshwright.data.stream import ShardedStream
from meshwright.mesh.axes import Axis
from meshwright_hf.datasets import TokenCollator

SHARDS = 32


def main(
    documents: Annotated[int, typer.Option(help="Documents in the dataset.")] = 10_000,
    tokens: Annotated[int, typer.Option(help="Tokens per document.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Rows per batch.")] = 32,
    form: Annotated[str, typer.Option(help="The dataset's format: python, numpy or torch.")] = "numpy",
    rounds: Annotated[int, typer.Option(help="Epochs of each contender; the contenders take turns.")] = 4,
) -> None:
    """Print the medians of the ratios within a round, and the cost of resuming from the middle."""
    table = Dataset.from_dict({"input_ids": [list(range(tokens))] * documents})
    dataset, collate = table.to_iterable_dataset(num_shards=SHARDS), TokenCollator()
    dataset = dataset.with_format(None if form == "python" else form)

    def plain(workers: int) -> Iterable[Any]:
        return DataLoader(dataset, batch_size=batch_size, collate_fn=collate, num_workers=workers)

    def stream(workers: int, **options: Any) -> ShardedStream:
        return ShardedStream(dataset, batch_size=batch_size, dp=Axis("dp"), num_workers=workers, **options)

    def ours(workers: int, **options: Any) -> Iterable[Any]:
        return (collate(rows.samples) for rows in stream(workers, **options))

    contenders: dict[str, Callable[[int], Iterable[Any]]] = {
        "plain": plain,
        "stream": ours,
        "shuffled": lambda workers: ours(workers, shuffle=True, buffer_size=1000),
    }
    draw = random.Random(0)
    print("| workers | plain, ms per step | stream / plain | shuffled stream / plain |\n|---|---|---|---|")
    for workers in (0, 1, 2):
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name in draw.sample(sorted(contenders), len(contenders)):
                start = time.perf_counter()
                steps = sum(1 for _ in contenders[name](workers))
                times[name].append((time.perf_counter() - start) / steps)
        ratios = [_ratio(times[name], times["plain"]) for name in ("stream", "shuffled")]
        print(f"| {workers} | {statistics.median(times['plain']) * 1e3:.2f} | {ratios[0]} | {ratios[1]} |")

    first = stream(0, shuffle=True)
    for _ in itertools.islice(first, documents // batch_size // 2):
        pass
    state = first.state_dict()
    second = stream(0, shuffle=True)
    second.load_state_dict(state)
    start = time.perf_counter()
    next(iter(second))
    print(f"\nstate: {len(json.dumps(state))} bytes; first batch after it: {time.perf_counter() - start:.3f} s")


def _ratio(times: list[float], others: list[float]) -> str:
    ratios = sorted(a / b for a, b in zip(times, others, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


if __name__ == "__main__":
    typer.run(main)
