"""Optimizers that keep other weights for evaluation than for training, and have ``train()`` and ``eval()`` for it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from torch.optim import Optimizer

from meshwright.optim.chained import chain_of
from meshwright.optim.offload import HostSteps
from meshwright.optim.runtime import Runtime
from meshwright.optim.zero.sliced_optimizer import LentSlices
from meshwright.parallel.shards.guard_windows import StepWindow


def follow_modes(optimizer: Optimizer, runtime: Runtime, host: HostSteps | None = None) -> None:
    """Let what an optimizer's ``train()`` and ``eval()`` do to what it steps of the weights reach the model.

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
    with contextlib.ExitStack() as stack:
        if zero is not None:
            zero.take_over()
            stack.enter_context(LentSlices(chain_of(optimizer), zero))
        if host is not None:
            host.lend()
            stack.callback(host.return_all)
        if (whole := runtime.gradients.whole) is not None:
            whole.open()
            stack.callback(whole.close)
        window.open(optimizer)
        stack.callback(window.close)
        method()
    if zero is not None:
        zero.publish()
