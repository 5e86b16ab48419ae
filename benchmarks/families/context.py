"""Every dense decoder under context parallelism, against itself on one device.

torchrun --nproc-per-node 2 -m benchmarks.families.context --results cp2.jsonl
torchrun --nproc-per-node 4 -m benchmarks.families.context --results cp4.jsonl
torchrun --nproc-per-node 4 -m benchmarks.families.context --method ring --method hybrid --only llama
python -m benchmarks.families.context_page cp2.jsonl cp4.jsonl

Losses, norms and every gradient of plain, packed and padded rows are compared in float64. The tolerance is 1e-10 of a
tensor's largest value: only the order of sums differs, by about 1e-16 per sum. A family that a method refuses is listed
with the reason. With ``--results`` each result is appended to a file at once, and results that the file holds are not
computed again, so a run that was stopped goes on. Exits with status 1 if a family differs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.progress import track
from torch import nn

import meshwright as mw
from benchmarks.families.models import DENSE, build, model_types
from benchmarks.families.one_device import largest_differences, own_groups
from benchmarks.families.parity import TOLERANCE
from meshwright.context.methods import METHODS
from meshwright.mesh.process_group import start_process_group, world_size

TIMEOUT = 600.0  # seconds that a rank waits for another; a busy machine runs one of them much later


@dataclass(frozen=True, kw_only=True)
class ContextRecord:
    """The result of a family under one plan.

    Args:
        family: the family.
        cp: the number of ranks that share each row.
        method: the method of context parallelism.
        differences: for each kind of rows, the largest relative difference from one device.
        refusal: why the plan is refused; None if it is not.
    """

    family: str
    cp: int
    method: str
    differences: dict[str, float] = field(default_factory=dict)
    refusal: str | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        return self.family, self.cp, self.method

    @property
    def differs(self) -> bool:
        return any(not off <= TOLERANCE for off in self.differences.values())


def read(path: Path) -> list[ContextRecord]:
    """Return the results that a file holds."""
    return [ContextRecord(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def check(family: str, method: str) -> ContextRecord:
    """Compare a family with one device; every rank must make the call, and only rank 0 compares."""
    record = ContextRecord(family=family, cp=world_size(), method=method)
    try:
        with own_groups():
            found = largest_differences(partial(build, family), partial(_plan_for, method=method))
    except mw.PlanError as error:
        return dataclasses.replace(record, refusal=str(error))
    return dataclasses.replace(record, differences=found)


def _plan_for(_: nn.Module, method: str) -> mw.ParallelPlan:
    ulysses = 2 if method == "hybrid" else None
    return mw.ParallelPlan(cp=world_size(), context=method, ulysses=ulysses)  # type: ignore[arg-type]


def main(
    method: Annotated[list[str] | None, typer.Option(help="a method; may be given several times")] = None,
    only: Annotated[list[str] | None, typer.Option(help="a family; may be given several times")] = None,
    results: Annotated[
        Path | None, typer.Option(help="a file to keep results in, and to read those of an interrupted sweep from")
    ] = None,
) -> None:
    """Compare every dense decoder under context parallelism with itself on one device; torchrun starts this program."""
    warnings.filterwarnings("ignore")
    records = read(results) if results else []
    start_process_group(torch.device("cpu"), TIMEOUT)
    dist.barrier()  # no rank reads the file after the first one has added to it
    is_first = dist.get_rank() == 0
    families = only or sorted(DENSE.keys() & set(model_types()))
    methods = method or [name for name in METHODS if name != "hybrid" or world_size() >= 4]
    done = {record.key for record in records}
    wanted = [(family, name) for family in families for name in methods if (family, world_size(), name) not in done]
    for family, name in track(wanted, "programs", disable=not (is_first and sys.stderr.isatty())):
        record = check(family, name)
        records.append(record)
        if results and is_first:
            with results.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(record)) + "\n")
    differ = [record for record in records if record.differs]
    if is_first:
        exact = sum(off <= TOLERANCE for record in records for off in record.differences.values())
        refused = [record for record in records if record.refusal]
        print(f"{exact} programs are exact, {len(differ)} differ, {len(refused)} families x methods are refused")
        for record in (*differ, *refused):
            print(f"{record.family}, {record.method}: {record.refusal or record.differences}")
    raise typer.Exit(1 if is_first and differ else 0)


if __name__ == "__main__":
    typer.run(main)
