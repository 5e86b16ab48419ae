"""The figures of a run in the Trainer's logs, and so in every tracker that it reports to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import TrainerState

from meshwright.monitor.monitor import Preparation, monitor_of, start_monitor
from meshwright.optim.runtime import Runtime, Watch
from meshwright.plan.config import ToDistributedConfig


def without_lines(config: ToDistributedConfig) -> ToDistributedConfig:
    """Return the options without those for status lines, since the Trainer logs instead."""
    return dataclasses.replace(config, logging_steps=None, logging_dir=None, max_steps=None)


def show_run(model: nn.Module, runtime: Runtime, config: ToDistributedConfig) -> None:
    """Show a card at the first step, and measure from then on; every rank makes the call.

    Raises:
        PlanError: on every rank, if rank 0 cannot write the log in ``config.logging_dir``.
    """
    if runtime.features.find(Watch) is None:
        start_monitor(model, runtime, config, Preparation.make(model, config), every=None)


def count_from(runtime: Runtime, state: TrainerState) -> None:
    """Count the steps from those of the Trainer, which may go on from a checkpoint."""
    monitor = monitor_of(runtime)
    if monitor is not None and not monitor.steps.has_begun:
        monitor.resumed(state.global_step, state.max_steps)


def figures_for(logs: Mapping[str, Any], runtime: Runtime, state: TrainerState) -> dict[str, float]:
    """Return the figures to add to a log of the training loss, on rank 0; every rank makes the call."""
    monitor = monitor_of(runtime)
    if monitor is None or "loss" not in logs or monitor.steps.steps == 0:
        return {}
    names = {"loss": "loss", "norm": "grad_norm", "lr": "learning_rate"}
    values = {name: logs.get(theirs) for name, theirs in names.items()}
    figures = monitor.figures_now(step=state.global_step, max_steps=state.max_steps, values=values)
    return {} if figures is None else figures.as_logs()
