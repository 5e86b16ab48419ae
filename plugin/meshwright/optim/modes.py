"""Optimizers that keep other weights for evaluation than for training, and have ``train()`` and ``eval()`` for it."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch.optim import Optimizer

from meshwright.optim.offload import HostSteps
from meshwright.optim.runtime import Runtime
from meshwright.parallel.shards.guard_windows import StepWindow


def follow_modes(optimizer: Optimizer, runtime: Runtime, host: HostSteps | None = None) -> None:
    """Let what an optimizer's ``train()`` and ``eval()`` do to its parts of the weights reach the model.

    Schedule-free optimizers have these methods. Every rank must call them.

    Args:
        optimizer: the optimizer.
        runtime: the runtime of its model.
        host: the steps on the host, if the plan offloads the optimizer.
    """
    for name in ("train", "eval"):
        if callable(method := getattr(optimizer, name, None)):
            setattr(optimizer, name, functools.partial(_switch, method, optimizer, runtime, host))


def _switch(method: Callable[[], object], optimizer: Optimizer, runtime: Runtime, host: HostSteps | None) -> None:
    zero, window = runtime.gradients.zero, StepWindow()
    runtime.meet_all("optimizer.train() or eval()")
    if zero is not None:
        zero.take_over()
    if host is not None:
        host.lend()
    window.open(optimizer)
    try:
        method()
    finally:
        window.close()
        if host is not None:
            host.return_all()
    if zero is not None:
        zero.publish()
