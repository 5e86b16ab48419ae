"""Every type with experts under every axis, against itself on one device.

torchrun --nproc-per-node 2 -m conformance.families.experts --results experts.jsonl
torchrun --nproc-per-node 2 -m conformance.families.experts --only mixtral --plan "dp2 ep2"

Losses, norms and every gradient of plain and padded rows are compared in float64. The tolerance is 1e-10 of a tensor's
largest value: only the order of sums differs, by about 1e-16 per sum. A plan that is refused is listed with the reason.
Exits with status 1 if a type differs. With ``--results FILE`` a sweep that was interrupted goes on where it ended.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

import meshwright as mw
from conformance.families.expert_models import EXPERTS, build
from conformance.families.kept_results import KeptResults, ResultsFile, start_sweep
from conformance.families.models import model_types
from conformance.families.one_device import largest_differences
from conformance.families.parity import TOLERANCE
from meshwright.plan.text import parse_plan

PLANS = ("dp2 zero3", "dp2 ep2", "tp2+sp", "tp2+sp ep2", "pp2", "cp2")
KINDS = ("plain", "padded")


def difference(family: str, plan: str) -> float:
    """Return the largest relative difference from one device; every rank must make the call."""
    given: Any = parse_plan(plan)
    return max(largest_differences(partial(build, family), lambda _: mw.ParallelPlan(**given), KINDS).values())


def main(
    plan: Annotated[list[str] | None, typer.Option(help="a plan; may be given several times")] = None,
    only: Annotated[list[str] | None, typer.Option(help="a type; may be given several times")] = None,
    results: ResultsFile = None,
) -> None:
    """Compare every type with experts under every axis with itself on one device; torchrun starts this program."""
    is_first = start_sweep()
    kept = KeptResults[float](results)
    families = only or sorted(EXPERTS.keys() & set(model_types()))
    programs = {
        f"{family}: {words}": partial(difference, family, words) for family in families for words in plan or PLANS
    }
    kept.run(programs, "types with experts")
    off, refused = kept.compared, kept.refused
    differ = {program: found for program, found in off.items() if found > TOLERANCE}
    if is_first:
        print(f"{len(off) - len(differ)} programs are exact, {len(differ)} differ, {len(refused)} are refused")
        for program, found in (*differ.items(), *refused.items()):
            print(f"{program}: {found}")
    raise typer.Exit(1 if is_first and differ else 0)


if __name__ == "__main__":
    typer.run(main)
