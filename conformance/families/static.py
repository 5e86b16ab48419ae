"""``python -m conformance.families.static``: run the static check on every family under every kind of plan."""

from __future__ import annotations

import sys
import time
import warnings
from typing import Annotated

import typer
from rich.progress import track

import meshwright as mw
from conformance.families.models import DENSE, build
from conformance.spmd import check_plan

PLANS = {
    "tp2": mw.ParallelPlan(tp=2),
    "tp2+sp": mw.ParallelPlan(tp=2, sequence_parallel=True),
    "dp2 tp2+sp zero1": mw.ParallelPlan(dp=2, tp=2, sequence_parallel=True, zero_stage=1),
    "dp2 tp2+sp zero3": mw.ParallelPlan(dp=2, tp=2, sequence_parallel=True, zero_stage=3),
    "dp2 tp2 zero2, two micro-batches": mw.ParallelPlan(dp=2, tp=2, zero_stage=2, gradient_accumulation_steps=2),
    "dp4": mw.ParallelPlan(dp=4),
}


def main(only: Annotated[list[str] | None, typer.Option(help="a family; may be given several times")] = None) -> None:
    """Check each tensor's type over tp in a step, and that every gradient is reduced, without starting processes.

    Exits with status 1 if the check finds a fault.
    """
    warnings.filterwarnings("ignore")
    if unknown := sorted(set(only or ()) - DENSE.keys()):
        raise typer.BadParameter(f"{', '.join(unknown)}: not among {', '.join(sorted(DENSE))}")
    start, count = time.perf_counter(), 0
    families = only or sorted(DENSE)
    for family in track(families, "families", disable=not sys.stderr.isatty()):
        for name, plan in PLANS.items():
            for finding in check_plan(lambda family=family: build(family).float(), plan):
                count += 1
                print(f"{family}, {name}: {finding}")
    print(f"{len(families)} families x {len(PLANS)} plans: {count} findings, {time.perf_counter() - start:.0f} s")
    raise typer.Exit(1 if count else 0)


if __name__ == "__main__":
    typer.run(main)
