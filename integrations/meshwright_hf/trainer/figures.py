"""The figures of a run in the Trainer's logs, and so in every tracker that it reports to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import TrainerState, TrainingArguments

from meshwright.monitor.monitor import Preparation, monitor_of, start_monitor
from meshwright.optim.runtime import Runtime, Watch
from meshwright.plan.config import ToDistributedConfig


def without_lines(config: ToDistributedConfig) -> ToDistributedConfig:
    """Return the options without those for status lines, since the Trainer logs instead."""
    return dataclasses.replace(config, logging_steps=None, logging_dir=None, max_steps=None)


def show_run(model: nn.Module, runtime: Runtime, config: ToDistributedConfig, args: TrainingArguments) -> None:
    """Show a card at the first step, and measure from then on; every rank makes the call.

    Raises:
        PlanError: on every rank, if rank 0 cannot write the log in ``config.logging_dir``.
    """
    if runtime.features.find(Watch) is None:
        prepared = Preparation.make(model, config, settings=_settings(args))
        start_monitor(model, runtime, config, prepared, every=None)


def count_from(runtime: Runtime, state: TrainerState) -> None:
    """Count the steps from those of the Trainer, which may go on from a checkpoint."""
    monitor = monitor_of(runtime)
    if monitor is not None and not monitor.steps.has_begun:
        monitor.resumed(state.global_step, state.max_steps)


def figures_for(logs: Mapping[str, Any], runtime: Runtime, state: TrainerState) -> dict[str, float]:
    """Return the figures to add to a log of the training loss, on rank 0; every rank makes the call.

    Other logs, such as those of an evaluation, go into the run's log as they are.
    """
    monitor = monitor_of(runtime)
    if monitor is None or monitor.steps.steps == 0:
        return {}
    if "loss" not in logs:
        monitor.note_values(logs, step=state.global_step)
        return {}
    names = {"loss": "loss", "norm": "grad_norm", "lr": "learning_rate"}
    values = {name: logs.get(theirs) for name, theirs in names.items()}
    figures = monitor.figures_now(step=state.global_step, max_steps=state.max_steps, values=values)
    return {} if figures is None else figures.as_logs()


def _settings(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments that differ from their defaults."""
    defaults = {option.name: option.default for option in dataclasses.fields(args)}
    return {name: x for name, x in args.to_sanitized_dict().items() if x is not None and x != defaults.get(name)}
