"""Watches the steps of all optimizers of this process, by hooks of torch that are never removed.

torch iterates over its hooks while a step runs, in which a model may be freed whose watcher would remove its hooks.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class StepWatcher(Protocol):
    """What is told of the steps of all optimizers."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before each step of each optimizer."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after each step of each optimizer."""


_watchers: list[weakref.ref[StepWatcher]] = []
_hooks: list[object] = []


def watch_every_step(watcher: StepWatcher) -> None:
    """Tell a watcher of the steps of all optimizers from now on, as long as something else refers to it."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before))
        _hooks.append(register_optimizer_step_post_hook(_after))
    _watchers[:] = [reference for reference in _watchers if reference() is not None]
    _watchers.append(weakref.ref(watcher))


def _before(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for watcher in [reference() for reference in _watchers]:
        if watcher is not None:
            watcher.before_step(optimizer)


def _after(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for watcher in [reference() for reference in _watchers]:
        if watcher is not None:
            watcher.after_step(optimizer)
