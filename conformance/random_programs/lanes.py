"""Runs programs on a few lanes at the same time, each with worker pools of its own that live as long as the lane."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from conformance.random_programs.compare import Outcome, judge
from conformance.random_programs.draw import PLANS, Program
from harness import WorkerPool

GRACE = 4.0  # seconds that the other ranks of a program have after one failed
RETIRE = 150  # programs until a lane's processes are replaced, so that a lane's memory stays small


def judged(
    programs: Iterable[Program], *, lanes: int, seconds: float | None = None, plant: str | None = None
) -> Iterator[Outcome]:
    """Yield the verdict on each program, as they come.

    Args:
        programs: the programs, in the order in which they are begun.
        lanes: number of programs that run at the same time.
        seconds: time after which no further program is begun.
        plant: the name of a fault to plant in each run under a plan.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    waiting = itertools.takewhile(lambda _: time.monotonic() < end, programs)
    idle, running = [Pools() for _ in range(lanes)], dict[Future[Outcome], Pools]()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(lanes) as executor:
        for pools in idle:
            stack.callback(pools.close)
        while True:
            for program in itertools.islice(waiting, len(idle)):
                pools = idle.pop()
                running[executor.submit(minimal, program, pools, plant)] = pools
            if not running:
                return
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                pools = running.pop(future)
                pools.count()
                idle.append(pools)
                yield future.result()


class Pools(dict[int, WorkerPool]):
    """A pool of workers for one process and for each size of a plan."""

    def __init__(self) -> None:
        super().__init__({size: WorkerPool(size, grace=GRACE) for size in sorted({1, *PLANS.values()})})
        self._programs = 0

    def count(self) -> None:
        """Count a program that these workers have run, and end them after some."""
        self._programs += 1
        if self._programs % RETIRE == 0:
            self.close()

    def close(self) -> None:
        """End all workers; a later run starts new ones."""
        for pool in self.values():
            pool.close()


def minimal(program: Program, pools: Pools, plant: str | None) -> Outcome:
    """Return the verdict on a program; if it is a fault, on fresh processes and for as few traits as show it."""
    outcome = judge(program, pools, plant=plant)
    if not outcome.is_fault:
        return outcome
    # It may have been a busy machine, or what an earlier program left behind.
    pools[program.world_size].close()
    again = judge(program, pools, plant=plant)
    if again.verdict == "hang" or again.verdict != outcome.verdict:
        return again
    for name in program.names:
        fewer = tuple(other for other in again.program.names if other != name)
        tried = judge(Program(seed=program.seed, plan=program.plan, names=fewer), pools, plant=plant)
        if tried.verdict == again.verdict:
            again = tried
    return again if again.program is program else _named(again, program)


def _named(outcome: Outcome, program: Program) -> Outcome:
    """Keep the program as it was drawn, and say which of its traits are enough."""
    enough = " + ".join(outcome.program.names) or "the plain loop"
    return Outcome(program, outcome.verdict, f"by {enough}: {outcome.why}", outcome.details)
