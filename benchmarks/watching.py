"""What it costs that the ranks compare what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Contender
from meshwright.faults.guard import active_guard

METHODS = ("begin_step", "collective", "meet")


def guard_shares(contender: Contender, warm_up: int, rounds: int) -> list[float]:
    """The part of each step's time that the guard takes, one a round.

    Of every call the shortest time over the ranks counts: the rank that comes last waits for nobody, while
    the others would wait for it in the collective that follows. (On and off in turn would say less: the
    difference is far below the noise of a step.)
    """
    guard = active_guard()
    assert guard is not None
    spent: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - start)

        return call

    shares = []
    for step in range(warm_up + rounds):
        dist.barrier()
        for name in METHODS:
            setattr(guard, name, timed(getattr(guard, name)))
        spent.clear()
        start = time.perf_counter()
        contender.step()
        seconds = time.perf_counter() - start
        for name in METHODS:
            delattr(guard, name)
        shortest = torch.tensor(spent, dtype=torch.float64)
        dist.all_reduce(shortest, dist.ReduceOp.MIN)
        if step >= warm_up:
            shares.append(shortest.sum().item() / seconds)
    return shares
