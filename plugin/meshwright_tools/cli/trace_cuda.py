"""``meshwright trace-cuda``: says where a plan would make the host wait for a GPU, without a GPU."""

from __future__ import annotations

import json as json_format
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright_tools.cli.command import ModelConfig, PlanWords, failures_of, say

if TYPE_CHECKING:
    from meshwright.plan.config import ParallelPlan
    from meshwright_tools.tracing.cuda_trace import CudaProgram, CudaStep


class TracePrecision(StrEnum):
    """The dtype of the weights, or of autocast."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    AUTOCAST = "autocast"


def trace_cuda(
    model: ModelConfig,
    plan: PlanWords,
    rows: Annotated[int, typer.Option(help="Number of rows of each rank's batch.")] = 4,
    length: Annotated[int, typer.Option(help="Number of tokens of a row.")] = 512,
    precision: Annotated[
        TracePrecision, typer.Option(help='Dtype of the weights; "autocast": float32 weights under bfloat16 autocast.')
    ] = TracePrecision.BFLOAT16,
    ranks: Annotated[
        int,
        typer.Option(help="Most ranks to trace: rank 0, its neighbour on each axis, one of each stage, then others."),
    ] = 8,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check without a GPU where a plan would make the host wait on CUDA, and whether the collectives fit together.

    Runs forward, backward, clipping and the optimizer's step of each rank on fake CUDA tensors, one rank after the
    other in this process. Nothing is computed, so no weights and no memory are needed. The step takes the branches of
    the code for CUDA and issues its collectives. The command reports where the host would wait for the GPU, copies that
    block, tensors on the wrong device, collectives that NCCL would not take, tensors that are used before their
    collective has ended, and traced ranks whose collectives differ in kind, size, dtype, root or order, on which NCCL
    would hang. docs/cuda.md says what the trace does not see.

    Without a GPU, the command first compiles a small library. This happens once, takes about 20 seconds and needs a C++
    compiler. The exit code is 0 if nothing was found, 1 if something was, and 2 if the model cannot run the plan or an
    argument is wrong.

    For example:

    \b
      meshwright trace-cuda --model llama --plan "dp2 tp2+sp zero1"
      meshwright trace-cuda --model config.json --plan "pp4 mb1" --precision autocast --json
    """
    with failures_of("trace-cuda", json=json):
        report = _report(model, plan, rows, length, precision, ranks)
        say(json_format.dumps(report, indent=2) if json else _text(report))
        sys.exit(1 if report["problems"] else 0)


def _report(model: Path, words: str, rows: int, length: int, precision: TracePrecision, ranks: int) -> dict[str, Any]:
    # Imported here so that --help is fast.
    import torch

    from meshwright.choose.given_plan import resolve_plan
    from meshwright.errors import PlanError
    from meshwright_tools.tracing.compare import has_towers, model_on_meta
    from meshwright_tools.tracing.cuda_trace import CudaProgram, chosen_ranks, compared_groups, order_problems

    for name, number in (("--rows", rows), ("--length", length), ("--ranks", ranks)):
        if number < 1:
            raise PlanError(f"{name} {number} must be at least 1")
    plan = resolve_plan(words, "--plan")
    program = CudaProgram(
        rows=rows, length=length, autocast=torch.bfloat16 if precision is TracePrecision.AUTOCAST else None
    )
    dtype = torch.bfloat16 if precision is TracePrecision.BFLOAT16 else torch.float32
    steps = _steps(model, plan, program, chosen_ranks(plan, ranks), dtype)
    found: dict[str, list[int]] = {}
    for rank, step in steps.items():
        for problem in step.problems:
            found.setdefault(problem, []).append(rank)
    return {
        "plan": plan.label,
        "skips_towers": has_towers(model_on_meta(model, dtype)),
        "ranks": len(steps),
        "traced": list(steps),
        "compared_groups": compared_groups(steps),
        "world_size": plan.world_size,
        "collectives": {rank: len(step.issued) for rank, step in steps.items()},
        "problems": [
            *({"problem": problem, "ranks": of_ranks} for problem, of_ranks in found.items()),
            *({"problem": problem, "ranks": []} for problem in order_problems(steps)),
        ],
    }


def _steps(model: Path, plan: ParallelPlan, program: CudaProgram, ranks: list[int], dtype: Any) -> dict[int, CudaStep]:
    from rich.console import Console
    from rich.progress import track

    from meshwright_tools.tracing.compare import model_on_meta
    from meshwright_tools.tracing.cuda_trace import trace_cuda_step

    console = Console(stderr=True)
    steps = track(ranks, "tracing ranks", console=console, disable=not console.is_terminal, transient=True)
    return {rank: trace_cuda_step(model_on_meta(model, dtype), plan, program, rank=rank) for rank in steps}


def _text(report: dict[str, Any]) -> str:
    traced = f"{report['plan']}: traced {report['ranks']} of {report['world_size']} ranks on fake CUDA tensors"
    issued = f"collectives and messages of a step: {max(report['collectives'].values())} on the rank with the most"
    lines = []
    for found in report["problems"]:
        of_ranks = found["ranks"]
        where = f" (rank{'s' * (len(of_ranks) > 1)} {', '.join(map(str, of_ranks))})" if of_ranks else ""
        lines.append(f"  {found['problem']}{where}")
    skipped = ["The rows are text alone, so the step has no tower."] if report["skips_towers"] else []
    return "\n".join([traced, issued, *skipped, *(["found:", *lines] if lines else [_nothing(report)])])


def _nothing(report: dict[str, Any]) -> str:
    found = "nothing found: the host waits for the GPU nowhere"
    ranks, groups = report["traced"], report["compared_groups"]
    if report["world_size"] == 1:
        return found
    if len(ranks) == report["world_size"]:
        return f"{found}, and the ranks' collectives fit together"
    if not groups:
        return f"{found}; no two of the traced ranks share a process group, so no collectives were compared"
    return (
        f"{found}, and the collectives of ranks {', '.join(map(str, ranks))} fit together in the process groups that "
        f"two or more of them share ({groups})"
    )
