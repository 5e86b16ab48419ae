"""Measures step times of contenders that take turns, so that other load on the machine affects them equally."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track

from benchmarks.contenders import Contender, Entry, OneProcess
from benchmarks.workload import Workload
from meshwright.faults.guard import active_guard
from meshwright.faults.interpose import observe

LOSS_TOLERANCE = 1e-4  # relative; float32 sums in another order stay well below it over the warm-up


class WrongAnswer(RuntimeError):
    """Raised if a contender's loss is not that of one process, so that its time is meaningless."""


def built_and_checked(entries: Sequence[Entry], workload: Workload, steps: int) -> dict[str, Contender]:
    """Build every entry, and run ``steps`` warm-up steps.

    Raises:
        WrongAnswer: on every rank, if a loss of the warm-up is not that of one process. The first loss checks a
            contender's forward pass, the next losses check its gradients and its updates.
    """
    expected = _losses(OneProcess(workload), steps)
    contenders = {}
    for entry in entries:
        contenders[entry.name] = entry.build(workload)
        losses = _losses(contenders[entry.name], steps)
        for step, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
            if not abs(loss - wanted) <= LOSS_TOLERANCE * abs(wanted):
                raise WrongAnswer(f"{entry.name}: loss {loss:.6f} in step {step}, not {wanted:.6f}")
    return contenders


def time_in_turn(contenders: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Return step times in seconds on this rank: contender -> one per round.

    In a round every contender takes one step. Each round has a new random order, the same on every rank. In a fixed
    order, the same contender would always follow a contender that leaves the other ranks idle.
    """
    order, draw = list(contenders), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    gc.disable()  # garbage is collected between rounds, since a collection within a step is noise
    try:
        for _ in track(range(rounds), "rounds", console=Console(stderr=True), disable=dist.get_rank() != 0):
            gc.collect()
            draw.shuffle(order)
            for name in order:
                seconds[name].append(_seconds_of_step(contenders[name]))
    finally:
        gc.enable()
    return seconds


def _losses(contender: Contender, steps: int) -> list[float]:
    """Return the global loss of each of the first steps, the same on every rank."""
    losses = []
    for _ in range(steps):
        loss = contender.step()
        total_and_ranks = torch.zeros(2) if loss is None else torch.stack([loss.float(), torch.ones(())])
        dist.all_reduce(total_and_ranks)
        losses.append((total_and_ranks[0] / total_and_ranks[1]).item())
    return losses


def _seconds_of_step(contender: Contender) -> float:
    """Return the wall time of a step, from when every rank is ready until every rank is done."""
    observe(active_guard() if contender.watched else None)
    dist.barrier()
    start = time.perf_counter()
    contender.step()
    dist.barrier()
    return time.perf_counter() - start
