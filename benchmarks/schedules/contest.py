"""Step times of a schedule of ours and of torch's class for it, which take turns in the same processes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from benchmarks.schedules.model import Sizes
from benchmarks.schedules.torch_schedules import TorchSchedule
from benchmarks.summary import Ratio
from meshwright.faults.guard import active_guard
from meshwright.faults.interpose import observe
from meshwright.verification.float64_modules import relative_difference


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The time of a step: seconds of wall time, and seconds of CPU time of all ranks."""

    wall: float
    cpu: float


@dataclass(frozen=True, kw_only=True)
class Contest:
    """The result of a contest with torch's schedule over one kind of stages.

    Args:
        ours: what our steps took, one for each round.
        theirs: what torch's steps took in the same rounds.
        off: the largest relative difference of a gradient between the two; 0 on all ranks but the first.
    """

    ours: list[Turn]
    theirs: list[Turn]
    off: float

    def __str__(self) -> str:
        ours, theirs = self.ours, self.theirs
        wall = Ratio.paired([turn.wall for turn in ours], [turn.wall for turn in theirs])
        cpu = Ratio.paired([turn.cpu for turn in ours], [turn.cpu for turn in theirs])
        seconds = median(turn.wall for turn in ours)
        return (
            f"ours / torch {wall} in time, {cpu} in CPU time of all ranks; {len(ours)} rounds, {seconds:.3f} s per "
            f"step; gradients differ by {self.off:.1e}"
        )


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a contest: a function that computes the gradients of a step, and one that clears them."""

    step: Callable[[], None]
    clear: Callable[[], None]


def compare(schedule: str, sizes: Sizes, *, stages: Sequence[str], rounds: int, seconds: float) -> dict[str, Contest]:
    """Compare the steps of a schedule; every rank must make the call. A step is forward and backward of a batch.

    Args:
        schedule: the schedule's name.
        sizes: the model and the rows.
        stages: the kinds of stages that torch's schedule runs; each is a side of its own.
        rounds: the largest number of rounds, each with a step of every side.
        seconds: the time after which no further round begins.

    Returns:
        The result for each kind of stages.
    """
    model, batch = sizes.distributed(schedule, dist.get_world_size()), sizes.batch()
    guard = active_guard()

    def ours() -> None:
        observe(guard)
        model(**batch).loss.backward()

    ours()
    own = mw.full_gradients(model)
    model.zero_grad()
    sides, off = [Side(step=ours, clear=model.zero_grad)], []
    for kind in stages:
        theirs = TorchSchedule(schedule, sizes, kind)
        observe(None)  # the guard must not watch torch's messages
        theirs.step()
        off.append(_largest_difference(own, _gathered(theirs.gradients())))
        theirs.zero_grad()
        sides.append(Side(step=theirs.step, clear=theirs.zero_grad))
    for side in sides:  # warm-up
        _turn(side)
    turns: list[list[Turn]] = [[] for _ in sides]
    gc.disable()
    end = time.perf_counter() + seconds
    for number in range(rounds):
        gc.collect()
        order = [(number + place) % len(sides) for place in range(len(sides))]
        for place in order if number // len(sides) % 2 else reversed(order):
            turns[place].append(_turn(sides[place]))
        if _first_says(time.perf_counter() > end):
            break
    gc.enable()
    observe(guard)
    return {
        kind: Contest(ours=turns[0], theirs=theirs, off=most)
        for kind, theirs, most in zip(stages, turns[1:], off, strict=True)
    }


def _turn(side: Side) -> Turn:
    """Return what a step takes, from when every rank is ready until every rank is done; clear its gradients."""
    observe(None)
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    side.step()
    used = time.process_time() - used
    observe(None)
    dist.barrier()
    wall, cpu = time.perf_counter() - start, torch.tensor(used, dtype=torch.float64)
    dist.all_reduce(cpu)
    side.clear()
    return Turn(wall=wall, cpu=cpu.item())


def _first_says(what: bool) -> bool:
    """Return the first rank's value, on every rank."""
    said = torch.tensor(what)
    dist.broadcast(said, 0)
    return bool(said)


def _gathered(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of all stages."""
    gathered: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return {name: x for one in gathered for name, x in one.items()}


def _largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    if dist.get_rank() != 0:
        return 0.0
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max(relative_difference(ours[name], x) for name, x in theirs.items())
