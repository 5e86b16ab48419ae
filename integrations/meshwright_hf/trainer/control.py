"""What the Trainer does after a step, on all ranks alike, and the figures that it logs."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from meshwright.faults.guard import active_guard
from meshwright.faults.preemption import Preemption
from meshwright.monitor.monitor import Preparation, monitor_of, start_monitor
from meshwright.optim.runtime import Runtime, Watch
from meshwright.plan.config import ToDistributedConfig
from meshwright_hf.launch.job import JOB_VARIABLE
from meshwright_hf.trainer.checks import StockTrainer

logger = logging.getLogger(__name__)

_FLAGS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")


class Control:
    """Makes what one rank's callbacks ask for after a step happen on every rank, after the same step.

    If the other ranks have already begun the next step, all do it after that one. Steps in which no rank asks for
    anything cost nothing. In a job that a scheduler starts again, a signal that announces the job's end asks for a
    checkpoint, after which all ranks end.
    """

    def __init__(self) -> None:
        self._wished: set[str] = set()  # what this rank asked for when the others had already gone on
        self._preemption = Preemption() if os.environ.get(JOB_VARIABLE) else None

    def settle(self, control: object) -> None:
        """Change a TrainerControl to what the ranks agree on; every rank makes the call after each step and epoch."""
        guard, signals = active_guard(), set() if self._preemption is None else self._preemption.wishes
        own = {flag for flag in _FLAGS if getattr(control, flag)} | self._wished
        if signals:
            own |= {"should_save", "should_training_stop", *signals}
        agreed = own if guard is None else guard.wishes_of_all(own)
        if self._preemption is not None:
            self._preemption.settle((agreed or set()) - set(_FLAGS))
        self._wished = own if agreed is None else set()
        for flag in _FLAGS:
            setattr(control, flag, flag in (agreed or ()))
        if agreed is not None and agreed - own:
            logger.warning("another rank asks for %s; this rank does the same", ", ".join(sorted(agreed - own)))

    def leave_if_preempted(self) -> None:
        """End this process, as all others, if what was just saved is the last checkpoint before the job's end."""
        if self._preemption is not None and self._preemption.reason is not None:
            self._preemption.leave()


class SavesTogether(JITCheckpointCallback):
    """Saves when SIGTERM has reached any rank: after the step, on all ranks, and then ends the training."""

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        """Do nothing: the checkpoint is saved after the step."""

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Do nothing: the checkpoint is saved after the step."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Ask for a checkpoint and for the end of the training."""
        if self.jit_manager is not None and self.jit_manager.is_checkpoint_requested:
            self.jit_manager.is_checkpoint_requested = False
            control.should_save = control.should_training_stop = True

    on_epoch_end = on_step_end


def save_together_on_sigterm(trainer: StockTrainer) -> None:
    """Replace the callback of ``enable_jit_checkpoint``, which saves on the rank alone that got the signal.

    In a job that a scheduler starts again it is removed, since ``Control`` saves, and ends the process with the exit
    code for which the scheduler starts it again.
    """
    callbacks = trainer.callback_handler.callbacks
    for index, stock in enumerate([*callbacks]):
        if type(stock) is JITCheckpointCallback:
            if os.environ.get(JOB_VARIABLE):
                assert stock.jit_manager is not None
                signal.signal(signal.SIGTERM, stock.jit_manager._original_sigterm_handler)
                callbacks.remove(stock)
                continue
            callbacks[index] = ours = SavesTogether()
            ours.trainer, ours.jit_manager = stock.trainer, stock.jit_manager


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
