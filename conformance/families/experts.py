"""Every type with experts under every axis, against itself on one device.

torchrun --nproc-per-node 2 -m conformance.families.experts --results experts.jsonl
torchrun --nproc-per-node 2 -m conformance.families.experts --only mixtral --plan "dp2 ep2"

Losses, norms and every gradient of plain and padded rows are compared in float64. The tolerance is 1e-10 of a tensor's
largest value: only the order of sums differs, by about 1e-16 per sum. A plan that is refused is listed with the reason.
Exits with status 1 if a type differs. With ``--results FILE`` a sweep that was interrupted goes on where it ended.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.progress import track

import meshwright as mw
from conformance.families.expert_models import EXPERTS, build
from conformance.families.kept_results import KeptResults
from conformance.families.models import model_types
from conformance.families.one_device import TIMEOUT, largest_differences
from conformance.families.parity import TOLERANCE
from meshwright.mesh.process_group import start_process_group
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
    results: Annotated[
        Path | None, typer.Option(help="a file for the results; results that it already has are not computed again")
    ] = None,
) -> None:
    """Compare every type with experts under every axis with itself on one device; torchrun starts this program."""
    warnings.filterwarnings("ignore")
    start_process_group(torch.device("cpu"), TIMEOUT)
    is_first = dist.get_rank() == 0
    kept = KeptResults[float](results)
    families = only or sorted(EXPERTS.keys() & set(model_types()))
    programs = [(family, words) for family in families for words in plan or PLANS]
    for family, words in track(programs, "types with experts", disable=not (is_first and sys.stderr.isatty())):
        kept.of(f"{family}: {words}", partial(difference, family, words))
    off = {program: found for program, found in kept.results.items() if not isinstance(found, str)}
    differ = {program: found for program, found in off.items() if found > TOLERANCE}
    refused = {program: found for program, found in kept.results.items() if isinstance(found, str)}
    if is_first:
        print(f"{len(off) - len(differ)} programs are exact, {len(differ)} differ, {len(refused)} are refused")
        for program, found in (*differ.items(), *refused.items()):
            print(f"{program}: {found}")
    raise typer.Exit(1 if is_first and differ else 0)


if __name__ == "__main__":
    typer.run(main)
