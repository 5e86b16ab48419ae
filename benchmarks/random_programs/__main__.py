"""``python -m benchmarks.random_programs``: compare random legal training programs with one process."""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from typing import Annotated

import typer
from rich.progress import track

from benchmarks.random_programs.compare import judge
from benchmarks.random_programs.draw import PLANS, Program
from harness import WorkerPool


def main(
    count: Annotated[int, typer.Option(help="number of programs")] = 500,
    first: Annotated[int, typer.Option(help="seed of the first program; the seeds count up from it")] = 0,
    verbose: Annotated[bool, typer.Option(help="print every program, instead of only silent and crashed ones")] = False,
) -> None:
    """Draw programs and plans, run each program with and without its plan, and compare all resulting numbers.

    A program must be equal to one process, or end with an error or a warning that says what to change. Exits with
    status 1 if a program is silently different, or ends with an error that does not say what to change.

    Examples:

        python -m benchmarks.random_programs
        python -m benchmarks.random_programs --first 137 --count 1 --verbose
    """
    warnings.filterwarnings("ignore")
    pools = {size: WorkerPool(size) for size in sorted(set(PLANS.values()))}
    verdicts: Counter[str] = Counter()
    start = time.perf_counter()
    try:
        for seed in track(range(first, first + count), "programs", disable=not sys.stderr.isatty()):
            program = Program.drawn(seed)
            outcome = judge(program, pools[program.world_size])
            verdicts[outcome.verdict] += 1
            if verbose or outcome.verdict in ("SILENT", "crashed"):
                print(f"{outcome.verdict}: {program}\n    {outcome.why}", flush=True)
    finally:
        for pool in pools.values():
            pool.close()
    said = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common())
    print(f"{count} programs from seed {first}: {said}; {time.perf_counter() - start:.0f} s")
    raise typer.Exit(1 if verdicts["SILENT"] or verdicts["crashed"] else 0)


if __name__ == "__main__":
    typer.run(main)
