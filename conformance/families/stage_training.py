"""Trains families over pipeline stages for many steps, under every schedule, against one process.

torchrun --nproc-per-node 4 -m conformance.families.stage_training
torchrun --nproc-per-node 4 -m conformance.families.stage_training --float32 --only llama --schedule zbv
torchrun --nproc-per-node 8 -m conformance.families.stage_training --only llama

Each program takes clipped AdamW steps on rows of changing lengths. In float64 the loss and the norm of each step and
all weights at the end are compared with one process: the tolerance is 1e-10 of a tensor's largest value, since only the
order of sums differs. In float32 the losses are compared with those of one process in float32, with a tolerance of
1e-5. The weights are not, since AdamW moves a weight whose gradient is nothing but rounding (a key's bias) by up to the
learning rate. The plans are those of ``PLANS`` that need this number of processes. Exits with status 1 if a program
differs or is refused. With ``--results FILE`` a sweep that was interrupted goes on where it ended.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

import meshwright as mw
from conformance.families.kept_results import TIMEOUT, KeptResults, ResultsFile, start_sweep
from conformance.families.stages import build_deeper
from meshwright.mesh.process_group import world_size
from meshwright.plan.schedule import SCHEDULES
from meshwright_tools.verification.float64_modules import in_float64
from support.exact import relative_difference

# Plain, tied with soft caps, tied with transposed weights, with a window, fused, with inner norms, with norms of heads,
# and with learned positions.
FAMILIES = ("llama", "gemma2", "gpt2", "mistral", "phi3", "olmo2", "qwen3", "opt")
PLANS: dict[str, dict[str, Any]] = {
    "tp2+sp pp2": {"tp": 2, "sequence_parallel": True},
    "dp2 pp2": {"dp": 2},
    "dp2 pp2 zero1": {"dp": 2, "zero_stage": 1},
    "pp2 cp2(gather)": {"cp": 2, "context": "gather"},
    "pp2 cp2(ulysses)": {"cp": 2, "context": "ulysses"},
    "pp2 cp2(ring)": {"cp": 2, "context": "ring"},
    "tp2+sp pp2 cp2(gather)": {"tp": 2, "sequence_parallel": True, "cp": 2, "context": "gather"},
    "tp2+sp pp2 cp2(ulysses)": {"tp": 2, "sequence_parallel": True, "cp": 2, "context": "ulysses"},
    "tp2+sp pp2 cp2(ring)": {"tp": 2, "sequence_parallel": True, "cp": 2, "context": "ring"},
    "pp2 cp4(hybrid)": {"cp": 4, "context": "hybrid", "ulysses": 2},
}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a program leaves.

    Args:
        losses: the loss of each step.
        norms: the norm of the gradients of each step.
        weights: all weights at the end; empty on all ranks but the first.
    """

    losses: Tensor
    norms: Tensor
    weights: dict[str, Tensor]

    def largest_difference(self, expected: Trained, dtype: torch.dtype) -> float:
        """Return the largest relative difference: of everything in float64, of the losses in float32."""
        found = (self.losses / expected.losses - 1).abs().max().item()
        if dtype is torch.float64:
            others = [relative_difference(self.weights[name], x) for name, x in expected.weights.items()]
            found = max(found, (self.norms / expected.norms - 1).abs().max().item(), *others)
        return found if found == found else float("inf")


def batches(steps: int) -> list[dict[str, Tensor]]:
    """Return eight rows for each step, with another length and other numbers of labels in each."""
    found = []
    for step in range(steps):
        ids = torch.randint(3, 97, (8, 9 + step % 4), generator=torch.Generator().manual_seed(step))
        labels = ids.clone()
        for row in range(len(labels)):
            labels[row, : (row + step) % 5] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def train(family: str, plan: mw.ParallelPlan | None, steps: int, dtype: torch.dtype) -> Trained:
    """Train a family; every rank must make the call, except for a program of one device (no plan)."""
    with in_float64() if dtype is torch.float64 else contextlib.nullcontext():
        model: Any = build_deeper(family).to(dtype).train()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        data: Any = batches(steps)
        if plan is not None:
            config = mw.ToDistributedConfig(plan=plan, timeout_s=TIMEOUT)
            model, optimizer, data = mw.to_distributed(model, optimizer, data, config=config)
        clip = torch.nn.utils.clip_grad_norm_ if plan is None else None
        losses, norms = [], []
        for batch in data:
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.item())
            norms.append(float(mw.clip_grad_norm_(model, 1.0) if clip is None else clip(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        weights = model.state_dict() if plan is None else mw.full_state_dict(model)
        return Trained(
            losses=torch.tensor(losses, dtype=dtype), norms=torch.tensor(norms, dtype=dtype), weights=weights or {}
        )


def plan_of(label: str, schedule: str) -> mw.ParallelPlan:
    """Return a plan of ``PLANS`` with two stages."""
    return mw.ParallelPlan(pp=2, schedule=schedule, gradient_accumulation_steps=4, **PLANS[label])  # type: ignore[arg-type]


def difference(family: str, plan: mw.ParallelPlan, steps: int, dtype: torch.dtype) -> float:
    """Return the largest difference from one process, on rank 0; every rank must make the call."""
    actual = train(family, plan, steps, dtype)
    if dist.get_rank() > 0:
        return 0.0
    return actual.largest_difference(_on_one_process(family, steps, dtype), dtype)


@cache
def _on_one_process(family: str, steps: int, dtype: torch.dtype) -> Trained:
    return train(family, None, steps, dtype)


def main(
    steps: Annotated[int, typer.Option(help="optimizer steps of each program")] = 20,
    float32: Annotated[bool, typer.Option("--float32", help="train in float32, and compare the losses only")] = False,
    only: Annotated[list[str] | None, typer.Option(help="a family; may be given several times")] = None,
    plan: Annotated[list[str] | None, typer.Option(help="a plan of the table; may be given several times")] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="a schedule; may be given several times")] = None,
    results: ResultsFile = None,
) -> None:
    """Train families under every plan and schedule, and compare them with one process; torchrun starts this program."""
    torch.set_num_threads(1)
    is_first = start_sweep()
    dtype = torch.float32 if float32 else torch.float64
    plans = plan or [label for label in PLANS if plan_of(label, "1f1b").world_size == world_size()]
    kept, programs, equal = KeptResults[float](results), 0, 0
    for family in only or FAMILIES:
        largest = 0.0
        for label in plans:
            for name in schedule or SCHEDULES:
                program = f"{family}, {label}, {name}, {steps} steps, {dtype}"
                result = kept.of(program, partial(difference, family, plan_of(label, name), steps, dtype))
                programs += 1
                if isinstance(result, str) or not result <= TOLERANCES[dtype]:
                    words = f"refused: {result}" if isinstance(result, str) else f"differs by {result:.1e}"
                    if is_first:
                        print(f"{program}: {words}", flush=True)
                else:
                    equal += 1
                    largest = max(largest, result)
        if is_first:
            print(f"{family}: largest difference {largest:.1e}", flush=True)
    if is_first:
        print(f"{equal} of {programs} programs equal one process")
    raise typer.Exit(1 if is_first and equal < programs else 0)


if __name__ == "__main__":
    typer.run(main)
