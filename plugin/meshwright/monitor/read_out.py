"""What a program asks of its run's monitor: the memory of every rank, and to log numbers of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import PlanError
from meshwright.monitor.card import Machine, estimate
from meshwright.monitor.held_memory import MemoryOfRanks, memory_of_ranks
from meshwright.monitor.monitor import monitor_of
from meshwright.optim.runtime import check_steps, plan_of, runtime_of
from meshwright.plan.config import ToDistributedConfig
from meshwright_plan.memory.peak import Memory


def memory_of(
    model: nn.Module, optimizer: Optimizer | None = None, *, batch_shape: tuple[int, int] | None = None
) -> MemoryOfRanks:
    """Return the memory of every rank: weights, gradients, optimizer state, the rest and the peak, beside the estimate.

    Every rank makes the call, and gets the figures of all ranks. Gradients are counted while they exist, so call it
    after ``backward`` and before ``zero_grad`` to see them.

    Args:
        model: the model that ``to_distributed`` returned.
        optimizer: its optimizer, whose state is counted; None leaves the state out.
        batch_shape: rows and tokens per row of the global batch, for the estimate. The default is that of the last step
            if ``ToDistributedConfig.logging_steps`` is set; otherwise there is no estimate.

    Raises:
        ValueError: if the model is not distributed, the optimizer belongs to another model, the shape is not two
            positive integers, or the planner cannot describe the model although a shape was passed.

    Example::

        loss.backward()
        print(mw.memory_of(model, optimizer))
    """
    plan, runtime = plan_of(model), runtime_of(model)
    _check(model, optimizer, batch_shape)
    monitor = monitor_of(runtime)
    passes, batch = 1, None
    if monitor is not None:
        passes, batch = monitor.steps.passes_per_step, monitor.steps.batch
    if batch_shape is not None:
        passes, batch = 1, (max(1, -(-batch_shape[0] // plan.dp)), batch_shape[1])
    estimated: list[Memory] = []
    if batch is not None and runtime.engine is None:
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        try:
            machine = Machine.find(model, ToDistributedConfig(), optimizer) if monitor is None else monitor.machine
            estimated = estimate(machine, plan, dtype, batch, passes).of_ranks()
        except PlanError:
            if batch_shape is not None:
                raise
    return memory_of_ranks(model, optimizer, estimated)


def log_values(model: nn.Module, values: Mapping[str, float], *, step: int | None = None) -> None:
    """Write numbers of the program, such as the loss of an evaluation, to the log of the run, for the report.

    Every rank may make the call; rank 0 writes. A name that begins with "eval" and ends with "loss" is drawn beside the
    loss.

    Args:
        model: the model that ``to_distributed`` returned.
        values: name -> number.
        step: the step to which the numbers belong; the default is the last one.

    Raises:
        ValueError: if the run has no log, or a value is not a number.

    Example::

        mw.log_values(model, {"eval_loss": total / count, "accuracy": right / count})
    """
    monitor = monitor_of(runtime_of(model))
    if monitor is None or not monitor.has_log_folder:
        raise PlanError(
            "log_values writes to the log of a run, and this run has none; call to_distributed(..., "
            "config=ToDistributedConfig(logging_steps=10, logging_dir='runs/first'))"
        )
    numbers = {name: x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x for name, x in values.items()}
    if wrong := [name for name, x in numbers.items() if isinstance(x, bool) or not isinstance(x, int | float)]:
        raise PlanError(f"log_values takes numbers, and {wrong[0]!r} is a {type(numbers[wrong[0]]).__name__}")
    monitor.note_values(numbers, step=step)


def _check(model: nn.Module, optimizer: object, batch_shape: object) -> None:
    if batch_shape is not None and not (
        isinstance(batch_shape, tuple | list)
        and len(batch_shape) == 2
        and all(type(size) is int and size > 0 for size in batch_shape)
    ):
        raise PlanError(
            f"batch_shape={batch_shape!r} must be rows and tokens per row, for example batch_shape=(8, 512)"
        )
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        raise PlanError(
            f"optimizer must be a torch.optim.Optimizer, not a {type(optimizer).__name__}; the order is "
            "memory_of(model, optimizer)"
        )
    check_steps(optimizer, model)
