"""Measures the idle share of a step whose operations sleep, against the simulation of the planner."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.schedules.model import Sizes
from meshwright.parallel.summed_gradients import SummedGradients
from meshwright.pipeline.schedule import SPLIT_BACKWARD, chunks_of
from meshwright.pipeline.weight_gradients import WeightGradients
from meshwright.planner.simulate import Pipeline, pipeline_time


class _Sleep(torch.autograd.Function):
    """Sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None


def simulated_bubble(schedule: str, p: int, m: int) -> float:
    """Return the idle share of a step according to the planner, if every operation takes the same time."""
    v = chunks_of(schedule)
    even = (1.0,) * (p * v)
    pipeline = Pipeline(schedule=schedule, ranks=p, forward=even, input_grad=even, weight_grad=even)
    return 1 - 3 * m * v / pipeline_time(pipeline, m)


def measured_bubble(schedule: str, m: int, seconds: float, steps: int) -> float:
    """Return the idle share of a step, the median of several steps; every rank must make the call.

    Each stage has one layer, whose forward, input gradient and weight gradient sleep for ``seconds`` each. All time of
    the step that is not slept counts as idle, so the computations of the tiny layers and the messages do too.

    Args:
        schedule: the schedule's name.
        m: micro-batches of a step.
        seconds: the sleep of each operation.
        steps: number of steps.
    """
    p, v = dist.get_world_size(), chunks_of(schedule)
    sizes = Sizes(layers=p * v, hidden=32, length=8, micro_batches=m)
    model, batch = sizes.distributed(schedule, p), sizes.batch()
    shares = []
    with _sleeping(model, seconds, splits=schedule in SPLIT_BACKWARD):
        for _ in range(steps + 1):  # the first step also announces dtypes
            dist.barrier()
            start = time.perf_counter()
            loss = model(**batch).loss
            dist.barrier()
            shares.append(1 - 3 * m * v * seconds / (time.perf_counter() - start))
            loss.backward()
            model.zero_grad()
    return median(shares[1:])


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
        time.sleep(seconds)
        original(later, sums, stage, micro_batch)

    original = WeightGradients.add_to
    layers: Any = model.model.layers  # type: ignore[union-attr]
    for layer in layers:  # the layers of other stages run no MLP
        layer.mlp.forward = sleeping(layer.mlp.forward)
    with mock.patch.object(WeightGradients, "add_to", add_to):
        yield
