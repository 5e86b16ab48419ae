"""Measures the idle share of a step whose operations sleep, against the simulation of the planner."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.schedules.model import Sizes
from meshwright.faults.interpose import waited
from meshwright.parallel.summed_gradients import SummedGradients
from meshwright.pipeline.weight_gradients import WeightGradients
from meshwright.plan.schedule import SPLIT_BACKWARD, chunks_of
from meshwright.planner.simulate import Pipeline, pipeline_time


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """The idle share of a step.

    Args:
        share: the share of the step in which a rank waits for others, in the mean of the ranks; the median over the
            steps.
        not_slept: the share of the step in which no operation sleeps, which also counts the computations of the tiny
            layers; the median over the steps.
        longest: how long the sleeps of a step took on the rank where they took longest, divided by what they should
            take; the median over the steps. Above 1.01, other programs kept the sleepers waiting, and the share means
            little.
    """

    share: float
    not_slept: float
    longest: float


_slept = 0.0  # seconds that the operations of this rank slept since the step began


def _sleep(seconds: float) -> None:
    global _slept
    start = time.perf_counter()
    time.sleep(seconds)
    _slept += time.perf_counter() - start


class _Sleep(torch.autograd.Function):
    """Sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        _sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _sleep(ctx.seconds)
        return grad, None, None


def simulated_bubble(schedule: str, p: int, m: int) -> float:
    """Return the idle share of a step according to the planner, if every operation takes the same time."""
    v = chunks_of(schedule)
    even = (1.0,) * (p * v)
    pipeline = Pipeline(schedule=schedule, ranks=p, forward=even, input_grad=even, weight_grad=even)
    return 1 - 3 * m * v / pipeline_time(pipeline, m)


def measured_bubble(schedule: str, m: int, seconds: float, steps: int) -> Bubble:
    """Measure the idle share of a step; every rank must make the call.

    Each stage has one layer, whose forward, input gradient and weight gradient sleep for ``seconds`` each.

    Args:
        schedule: the schedule's name.
        m: micro-batches of a step.
        seconds: the sleep of each operation.
        steps: number of steps.
    """
    global _slept
    p, v = dist.get_world_size(), chunks_of(schedule)
    sizes = Sizes(layers=p * v, hidden=32, length=8, micro_batches=m)
    model, batch = sizes.distributed(schedule, p), sizes.batch()
    shares, not_slept, longest, work = [], [], [], 3 * m * v * seconds
    with _sleeping(model, seconds, splits=schedule in SPLIT_BACKWARD):
        for _ in range(steps + 1):  # the first step also announces dtypes
            dist.barrier()
            start, waited_before, _slept = time.perf_counter(), waited(), 0.0
            loss = model(**batch).loss
            dist.barrier()
            wall, own_waits = time.perf_counter() - start, waited() - waited_before
            waits = torch.tensor(own_waits, dtype=torch.float64)
            dist.all_reduce(waits)
            shares.append(waits.item() / p / wall)
            not_slept.append(1 - work / wall)
            most = torch.tensor(_slept, dtype=torch.float64)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            longest.append(most.item() / work)
            loss.backward()
            model.zero_grad()
    return Bubble(share=median(shares[1:]), not_slept=median(not_slept[1:]), longest=median(longest[1:]))


@contextlib.contextmanager
def _sleeping(model: nn.Module, seconds: float, *, splits: bool) -> Iterator[None]:
    """Let the operations of every stage sleep inside the context.

    Args:
        model: a distributed Llama with one layer for each stage.
        seconds: the sleep of each operation.
        splits: whether the schedule computes the gradients of weights apart.
    """

    def sleeping(method: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: _Sleep.apply(method(x), seconds, seconds if splits else 2 * seconds)

    def add_to(later: WeightGradients, sums: SummedGradients, stage: int, micro_batch: int) -> None:
        _sleep(seconds)
        original(later, sums, stage, micro_batch)

    original = WeightGradients.add_to
    layers: Any = model.model.layers  # type: ignore[union-attr]
    for layer in layers:  # the layers of other stages run no MLP
        layer.mlp.forward = sleeping(layer.mlp.forward)
    with mock.patch.object(WeightGradients, "add_to", add_to):
        yield
