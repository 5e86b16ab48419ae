"""Step times of a schedule of ours and of torch's class for it, which take turns in the same processes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

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
class Contest:
    """The result of a contest.

    Args:
        ratio: our step time / that of torch, paired within a round.
        off: the largest relative difference of a gradient between the two; 0 on all ranks but the first.
    """

    ratio: Ratio
    off: float


def compare(schedule: str, sizes: Sizes, rounds: int) -> Contest:
    """Compare the steps of a schedule; every rank must make the call. A step is forward and backward of a batch."""
    model, batch = sizes.distributed(schedule, dist.get_world_size()), sizes.batch()
    guard = active_guard()
    theirs = TorchSchedule(schedule, sizes)

    def ours() -> None:
        observe(guard)
        model(**batch).loss.backward()

    def of_torch() -> None:
        observe(None)  # the guard must not watch torch's messages
        theirs.step()

    of_torch()
    found = _gathered(theirs.gradients())
    theirs.zero_grad()
    ours()
    off = _largest_difference(mw.full_gradients(model), found)
    model.zero_grad()
    for step, clear in ((ours, model.zero_grad), (of_torch, theirs.zero_grad)):  # warm-up
        _seconds(step)
        clear()
    seconds: tuple[list[float], list[float]] = [], []
    gc.disable()
    for number in range(rounds):
        gc.collect()
        for place in (0, 1) if number % 2 else (1, 0):
            step, clear = ((ours, model.zero_grad), (of_torch, theirs.zero_grad))[place]
            seconds[place].append(_seconds(step))
            clear()
    gc.enable()
    observe(guard)
    return Contest(ratio=Ratio.paired(*seconds), off=off)


def _seconds(step: Callable[[], None]) -> float:
    """Return the wall time of a step, from when every rank is ready until every rank is done."""
    observe(None)
    dist.barrier()
    start = time.perf_counter()
    step()
    observe(None)
    dist.barrier()
    return time.perf_counter() - start


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
