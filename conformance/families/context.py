"""Every dense decoder under context parallelism, against itself on one device.

torchrun --nproc-per-node 2 -m conformance.families.context --results cp2.jsonl
torchrun --nproc-per-node 4 -m conformance.families.context --results cp4.jsonl
torchrun --nproc-per-node 4 -m conformance.families.context --method ring --method hybrid --only llama
python -m conformance.families.context_page cp2.jsonl cp4.jsonl

Losses, norms and every gradient of plain, packed and padded rows are compared in float64. The tolerance is 1e-10 of a
tensor's largest value: only the order of sums differs, by about 1e-16 per sum. A family that a method refuses is listed
with the reason. Exits with status 1 if a family differs. With ``--results FILE`` a sweep that was interrupted goes on
where it ended.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from torch import nn

import meshwright as mw
from conformance.families.kept_results import KeptResults, ResultsFile, start_sweep
from conformance.families.models import DENSE, build, model_types
from conformance.families.one_device import largest_differences
from conformance.families.parity import TOLERANCE
from meshwright.mesh.process_group import world_size
from meshwright.plan.parts import METHODS

Differences = dict[str, float]  # for each kind of rows, the largest relative difference from one device


def differences(family: str, method: str) -> Differences:
    """Compare a family with one device; every rank must make the call, and only rank 0 compares."""
    return largest_differences(partial(build, family), partial(_plan_for, method=method))


def _plan_for(_: nn.Module, method: str) -> mw.ParallelPlan:
    ulysses = 2 if method == "hybrid" else None
    return mw.ParallelPlan(cp=world_size(), context=method, ulysses=ulysses)  # type: ignore[arg-type]


def main(
    method: Annotated[list[str] | None, typer.Option(help="a method; may be given several times")] = None,
    only: Annotated[list[str] | None, typer.Option(help="a family; may be given several times")] = None,
    results: ResultsFile = None,
) -> None:
    """Compare every dense decoder under context parallelism with itself on one device; torchrun starts this program."""
    is_first = start_sweep()
    families = only or sorted(DENSE.keys() & set(model_types()))
    methods = method or [name for name in METHODS if name != "hybrid" or world_size() >= 4]
    kept = KeptResults[Differences](results)
    programs = {f"{f} {m} cp{world_size()}": partial(differences, f, m) for f in families for m in methods}
    kept.run(programs, "programs")
    compared, refused = kept.compared, kept.refused
    differ = {program: found for program, found in compared.items() if max(found.values()) > TOLERANCE}
    if is_first:
        exact = sum(off <= TOLERANCE for found in compared.values() for off in found.values())
        print(f"{exact} programs are exact, {len(differ)} differ, {len(refused)} families x methods are refused")
        for program, found in (*differ.items(), *refused.items()):
            print(f"{program}: {found}")
    raise typer.Exit(1 if is_first and differ else 0)


if __name__ == "__main__":
    typer.run(main)
