"""Measures how much time the ranks spend on comparing what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Contender
from meshwright.faults.guard import active_guard
from meshwright.optim.runtime import find_runtime

METHODS = ("begin_step", "collective", "meet")
COMPARISONS = ("statement", "statement_before_forward", "compare_weights")


def guard_shares(contender: Contender, warm_up: int, rounds: int) -> list[float]:
    """Return the share of each step's time that the guard and the comparison of replicas take, one per round.

    For every call, the shortest time over the ranks counts. The last rank to call does not wait, and the others would
    wait for it in the following collective anyway. (Alternating steps with and without the guard would show less, since
    the difference is far below the noise of a step.) For the comparison of weights, CPU time counts instead of wall
    time: the comparison runs while gradients are reduced, and its collective waits for them, as the step would anyway.
    """
    guard = active_guard()
    assert guard is not None
    runtime = find_runtime(contender.model)
    comparison = None if runtime is None else runtime.comparison
    timed_methods: list[tuple[Any, str]] = [(guard, name) for name in METHODS]
    timed_methods += [] if comparison is None else [(comparison, name) for name in COMPARISONS]
    spent: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.thread_time if method.__name__ == "compare_weights" else time.perf_counter

        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return method(*args, **kwargs)
            finally:
                spent.append(clock() - start)

        return call

    shares = []
    for step in range(warm_up + rounds):
        dist.barrier()
        for owner, name in timed_methods:
            setattr(owner, name, timed(getattr(owner, name)))
        spent.clear()
        start = time.perf_counter()
        contender.step()
        seconds = time.perf_counter() - start
        for owner, name in timed_methods:
            delattr(owner, name)
        shortest = torch.tensor(spent, dtype=torch.float64)
        dist.all_reduce(shortest, dist.ReduceOp.MIN)
        if step >= warm_up:
            shares.append(shortest.sum().item() / seconds)
    return shares
