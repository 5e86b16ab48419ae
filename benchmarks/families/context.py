"""Every dense decoder under context parallelism, against itself on one device.

torchrun --nproc-per-node 2 -m benchmarks.families.context
torchrun --nproc-per-node 4 -m benchmarks.families.context --method ring --method hybrid --only llama

Losses, norms and every gradient of plain, packed and padded rows are compared in float64. The tolerance is 1e-10 of a
tensor's largest value: only the order of sums differs, by about 1e-16 per sum. A family that a method refuses is listed
with the reason. Exits with status 1 if a family differs.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.progress import track
from torch import nn

import meshwright as mw
from benchmarks.families.models import DENSE, build, model_types
from benchmarks.families.one_device import ROWS, largest_difference, own_groups
from benchmarks.families.parity import TOLERANCE
from meshwright.mesh.process_group import start_process_group, world_size

METHODS = ("gather", "ulysses", "ring", "hybrid")


def plan_for_context(_: nn.Module, method: str) -> mw.ParallelPlan:
    """Return the plan that gives each process a part of every row."""
    ulysses = 2 if method == "hybrid" else None
    return mw.ParallelPlan(cp=world_size(), context=method, ulysses=ulysses)  # type: ignore[arg-type]


def main(
    method: Annotated[list[str] | None, typer.Option(help="a method; may be given several times")] = None,
    only: Annotated[list[str] | None, typer.Option(help="a family; may be given several times")] = None,
) -> None:
    """Compare every dense decoder under context parallelism with itself on one device; torchrun starts this program."""
    warnings.filterwarnings("ignore")
    start_process_group(torch.device("cpu"), 120.0)
    is_first = dist.get_rank() == 0
    families = only or sorted(DENSE.keys() & set(model_types()))
    methods = method or [name for name in METHODS if name != "hybrid" or world_size() >= 4]
    exact, differ, refused = 0, [], {}
    for family in track(families, "families", disable=not (is_first and sys.stderr.isatty())):
        for name in methods:
            for kind in ROWS:
                try:
                    with own_groups():
                        off = largest_difference(partial(build, family), partial(plan_for_context, method=name), kind)
                except mw.PlanError as error:
                    refused[family, name] = str(error)
                    break
                exact += off <= TOLERANCE
                if off > TOLERANCE:
                    differ.append(f"{family}, {name}, {kind}: differs by {off:.1e}")
    if is_first:
        print(f"{exact} programs are exact, {len(differ)} differ, {len(refused)} families x methods are refused")
        print(*differ, *(f"{family}, {name}: {reason}" for (family, name), reason in refused.items()), sep="\n")
    raise typer.Exit(1 if is_first and differ else 0)


if __name__ == "__main__":
    typer.run(main)
