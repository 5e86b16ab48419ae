"""Optimizers that keep other weights for evaluation than for training, and have ``train()`` and ``eval()`` for it."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch.optim import Optimizer

from meshwright.optim.runtime import Runtime
from meshwright.parallel.guard_windows import StepWindow


def follow_modes(optimizer: Optimizer, runtime: Runtime) -> None:
    """Let what an optimizer's ``train()`` and ``eval()`` do to its parts of the weights reach the model.

    Schedule-free optimizers have these methods. Every rank must call them.
    """
    for name in ("train", "eval"):
        if callable(method := getattr(optimizer, name, None)):
            setattr(optimizer, name, functools.partial(_switch, method, optimizer, runtime))


def _switch(method: Callable[[], object], optimizer: Optimizer, runtime: Runtime) -> None:
    zero, window = runtime.gradients.zero, StepWindow()
    runtime.meet_all("optimizer.train() or eval()")
    if zero is not None:
        zero.take_over()
    window.open(optimizer)
    try:
        method()
    finally:
        window.close()
    if zero is not None:
        zero.publish()
