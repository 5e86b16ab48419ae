"""Measures the step of Muon under ZeRO-1, where each matrix has an owner, against Muon that every rank steps whole.

torchrun --nproc-per-node 2 -m benchmarks.owners

Both contenders have Muon for the matrices of the layers and AdamW for the rest. Forward and backward, on few tokens,
only make gradients: the optimizer's step alone is timed. Wall and CPU time are those of the rank that has more.
"""

from __future__ import annotations

import os
import random
import time
import warnings
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import meshwright as mw
from benchmarks.contenders import Ours
from benchmarks.environment import environment
from benchmarks.summary import Ratio
from benchmarks.timing import say
from benchmarks.workload import Workload

GOAL = 0.65
REPLICATED, OWNED = "dp2", "dp2 zero1"
PLANS: dict[str, dict[str, Any]] = {REPLICATED: {"dp": 2}, OWNED: {"dp": 2, "zero_stage": 1}}
_WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class WithMuon(Workload):
    """The workload of the other benchmarks, with Muon for its matrices and few tokens."""

    sequence_length: int = 16

    def optimizer(self, parameters: Any) -> Any:
        kinds: dict[bool, list[Any]] = {True: [], False: []}
        for p in parameters:
            kinds[p.ndim == 2 and p.shape[0] != self.vocab_size].append(p)
        return mw.ChainedOptimizer(torch.optim.Muon(kinds[True], lr=0.02), torch.optim.AdamW(kinds[False], lr=1e-3))


def timed_step(contender: Ours) -> tuple[float, float]:
    """Return the wall and the CPU seconds of an optimizer's step."""
    contender.forward().backward()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    contender.optimizer.step()
    found = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    contender.optimizer.zero_grad()
    return found[0].item(), found[1].item()


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Number of measured steps of each contender.")] = 30,
    hidden: Annotated[int, typer.Option(help="Width of the layers.")] = 512,
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 4,
    vocabulary: Annotated[int, typer.Option(help="Rows of the embedding and of the head.")] = 32000,
) -> None:
    """Print the step times of both contenders and their paired ratio; torchrun starts this program on each rank."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "num_hidden_layers": layers}
    workload = WithMuon(**sizes, vocab_size=vocabulary)
    contenders = {name: Ours(workload, **plan) for name, plan in PLANS.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    draw = random.Random(0)  # the same order on every rank, another in each round
    for number in range(_WARM_UP + rounds):
        for name in draw.sample(list(contenders), len(contenders)):
            found = timed_step(contenders[name])
            if number >= _WARM_UP:
                seconds[name].append(found)
    where = environment()
    say(f"{where['machine']}, {where['cores']} cores, torch {where['versions']['torch']}, commit {where['commit']}")
    say(f"{rounds} rounds, load average {os.getloadavg()[0]:.1f}\n\n| plan | wall s | CPU s |\n|---|---|---|")
    for name, own in seconds.items():
        wall, cpu = zip(*own, strict=True)
        say(f"| {name} | {median(wall):.3f} | {median(cpu):.3f} |")
    ratios = [Ratio.paired(*(tuple(x[i] for x in seconds[name]) for name in (OWNED, REPLICATED))) for i in (0, 1)]
    say(f"\n{OWNED} / {REPLICATED}: {ratios[0]} of the wall time, {ratios[1]} of the CPU time; goal <= {GOAL}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
