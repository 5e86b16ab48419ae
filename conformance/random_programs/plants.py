"""Faults that are planted in the run under a plan, to show that the comparison finds each of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.random_programs import run as running
from conformance.random_programs.draw import Program
from conformance.random_programs.run import Numbers, Run, run
from meshwright.errors import PlanError
from meshwright.faults.guard import active_guard
from meshwright.parallel.gradients.sync import AllReduce

Planted = contextlib.AbstractContextManager[Any]


def run_with(program: Program, *, distributed: bool, plant: str | None = None) -> Numbers:
    """Run a program, with a planted fault if it is named and the run is under a plan."""
    if plant == "nothing is compared":
        return Numbers(plan=program.plan)
    with PLANTS[plant]() if plant is not None and distributed else contextlib.nullcontext():
        try:
            numbers = run(program, distributed=distributed)
        except Exception:
            if (guard := active_guard()) is not None:
                guard.close("its program failed")  # as the end of a process does, so that ranks which wait raise too
            raise
    if plant == "a rank says another loss" and distributed and _is_last():
        numbers.losses[-1] += 1e-6
    return numbers


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def _loss_of_one_rank() -> Planted:
    """Double the gradient of the last rank's loss."""
    backward = torch.Tensor.backward

    def wrong(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        backward(loss * 2 if _is_last() else loss, *args, **kwargs)

    return mock.patch.object(torch.Tensor, "backward", wrong)


def _loss_of_all_ranks() -> Planted:
    backward = torch.Tensor.backward
    return mock.patch.object(torch.Tensor, "backward", lambda loss, *args: backward(loss * 1.5, *args))


def _bucket_turned() -> Planted:
    """Turn the sign of half of each bucket, on all ranks, since replicas that differ are found without comparing."""
    start = AllReduce.start

    def wrong(self: AllReduce, bucket: Any, flat: Any) -> Any:
        flat[: len(flat) // 2].neg_()
        return start(self, bucket, flat)

    return mock.patch.object(AllReduce, "start", wrong)


def _hooks_twice() -> Planted:
    """Install each forward hook of Meshwright twice."""
    install = nn.Module.register_forward_hook

    def twice(module: nn.Module, hook: Callable[..., Any], **options: Any) -> Any:
        if "meshwright" in getattr(hook, "__module__", "") or "meshwright" in type(hook).__module__:
            install(module, hook, **options)
        return install(module, hook, **options)

    return mock.patch.object(nn.Module, "register_forward_hook", twice)


def _collator_of_each_rank() -> Planted:
    """Cut each rank's rows to their own longest one, as if its collator had seen these rows alone."""

    class Cut(Run):
        def _loss(self, batch: dict[str, Any]) -> Tensor:
            used = batch["attention_mask"].any(0).nonzero().flatten()
            inside = slice(int(used[0]), int(used[-1]) + 1)
            return super()._loss({name: x[:, inside] for name, x in batch.items()})

    return mock.patch.object(running, "Run", Cut)


def _no_plan() -> Planted:
    """Train all rows on each rank without a plan, which gives the numbers of one process."""

    class Alone(Run):
        def __init__(self, program: Program, distributed: bool):
            super().__init__(program, False)

    return mock.patch.object(running, "Run", Alone)


def _skipped_weight() -> Planted:
    """Leave one weight out of each step."""

    class Skips(Run):
        def _step(self) -> None:
            weight = self.model.model.norm.weight
            before = weight.detach().clone()
            super()._step()
            with torch.no_grad():
                weight.copy_(before)

    return mock.patch.object(running, "Run", Skips)


def _before_each_step(fault: Callable[[], object]) -> Planted:
    class Faulty(Run):
        def _step(self) -> None:
            fault()
            super()._step()

    return mock.patch.object(running, "Run", Faulty)


def _add_unlike_sizes() -> Tensor:
    return torch.zeros(2) + torch.zeros(3)


def _refusal() -> Planted:
    """Refuse a program that is right."""
    error = PlanError("this model has 2 layers, which cannot be trained; set tp=1")
    return mock.patch("meshwright.to_distributed", side_effect=error)


PLANTS: dict[str, Callable[[], Planted]] = {
    "loss of one rank doubled": _loss_of_one_rank,
    "loss of all ranks scaled": _loss_of_all_ranks,
    "half of a bucket turned": _bucket_turned,
    "hooks installed twice": _hooks_twice,
    "a collator for each rank": _collator_of_each_rank,
    "no plan is applied": _no_plan,
    "a weight is not stepped": _skipped_weight,
    "an error of torch": lambda: _before_each_step(_add_unlike_sizes),
    "an error on one rank": lambda: _before_each_step(lambda: _is_last() and _add_unlike_sizes()),
    "a hang": lambda: _before_each_step(lambda: time.sleep(1e4)),
    "a needless refusal": _refusal,
    "nothing is compared": contextlib.nullcontext,
    "a rank says another loss": contextlib.nullcontext,
}
