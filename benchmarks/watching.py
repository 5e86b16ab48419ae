"""What it costs that the ranks compare what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from benchmarks.contenders import Contender
from meshwright.faults.guard import active_guard


def guard_shares(contender: Contender, warm_up: int, rounds: int) -> list[float]:
    """The part of each step's time that this rank spends in the guard, waiting for the others included.

    On and off in turn would say less: the difference is far below the noise of a step.
    """
    guard = active_guard()
    assert guard is not None
    spent = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent += time.perf_counter() - start

        return call

    for name in ("meet", "collective", "begin_step"):
        setattr(guard, name, timed(getattr(guard, name)))
    try:
        shares = []
        for step in range(warm_up + rounds):
            dist.barrier()
            spent, start = 0.0, time.perf_counter()
            contender.step()
            if step >= warm_up:
                shares.append(spent / (time.perf_counter() - start))
        return shares
    finally:
        for name in ("meet", "collective", "begin_step"):
            delattr(guard, name)
