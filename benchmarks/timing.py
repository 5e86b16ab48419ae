"""Measures step times of contenders that take turns in the same processes."""

from __future__ import annotations

import gc
import random
import time

import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks.contenders import Contender
from meshwright.faults.guard import active_guard
from meshwright.faults.interpose import observe


class Clocked(Contender):
    """A contender that measures CPU seconds, since other programs on the machine change them less than wall time."""

    def __init__(self, contender: Contender):
        self.contender, self.watched = contender, contender.watched
        self.seconds: list[float] = []

    def step(self) -> Tensor | None:
        start = time.process_time()
        loss = self.contender.step()
        self.seconds.append(time.process_time() - start)
        return loss


def say(text: str) -> None:
    """Print a line of figures at once, on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def time_after_warm_up(contenders: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Return the step times of ``time_in_turn`` after two rounds that are not measured."""
    time_in_turn(contenders, 2)
    return time_in_turn(contenders, rounds)


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


def _seconds_of_step(contender: Contender) -> float:
    """Return the wall time of a step, from when every rank is ready until every rank is done."""
    observe(active_guard() if contender.watched else None)
    dist.barrier()
    start = time.perf_counter()
    contender.step()
    dist.barrier()
    return time.perf_counter() - start
