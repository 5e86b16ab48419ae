"""``python -m benchmarks.packing``: measure how full packed rows are, what packing costs, and which tokens it loses."""

from __future__ import annotations

import random
import statistics
import time
from typing import Annotated, Any

import typer

from meshwright.data.packing import Packing

STRATEGIES: tuple[Any, ...] = ("best_fit", "concatenate")


def main(
    documents: Annotated[int, typer.Option(help="Number of documents, whose lengths are log-normal.")] = 100_000,
    median: Annotated[float, typer.Option(help="Median length of a document in tokens.")] = 245.0,
    sigma: Annotated[float, typer.Option(help="Standard deviation of the logarithm of a document's length.")] = 1.0,
    rounds: Annotated[int, typer.Option(help="Number of measurements; the result is their median.")] = 3,
) -> None:
    """Print a table of fill, tokens lost and time."""
    chooser = random.Random(0)
    lengths = [max(1, int(median * chooser.lognormvariate(0, sigma))) for _ in range(documents)]
    print("| row length | strategy | fill | tokens lost | us per document |\n|---|---|---|---|---|")
    for length in (1024, 2048, 4096, 8192):
        for strategy in STRATEGIES:
            packing, seconds = Packing(length, strategy), []
            for _ in range(rounds):
                start = time.perf_counter()
                rows = packing.rows(lengths)
                seconds.append(time.perf_counter() - start)
            packed = sum(piece.stop - piece.start for row in rows for piece in row)
            cost = statistics.median(seconds) / documents * 1e6
            fill = packed / (length * len(rows))
            print(f"| {length} | {strategy} | {fill:.4f} | {sum(lengths) - packed} | {cost:.1f} |")


if __name__ == "__main__":
    typer.run(main)
