"""Saves and resumes the Trainer's checkpoints as one-device files, which every plan can read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.data.loader import DistributedLoader
from meshwright.optim.runtime import Runtime, runtime_of
from meshwright_hf.trainer_data import rest_of_epoch
from meshwright_hf.trainer_state import (
    OPTIMIZER,
    SCHEDULER,
    load_weights,
    place_in_epoch,
    read_progress,
    save_progress,
    save_weights,
)

logger = logging.getLogger(__name__)


class CheckpointMixin:
    """Overrides the Trainer's methods that save and resume."""

    # Attributes of the Trainer that this mixin uses.
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    processing_class: Any
    data_collator: Any
    _train_batch_size: int
    _distribute: Callable[[], None]

    _train_loader: DistributedLoader | None = None
    _epoch_draws: Tensor | None = None  # torch's random state when the epoch began; samplers draw the order from it

    @property
    def _runtime(self) -> Runtime:
        return runtime_of(self.model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write one-device weights and all other files for ``from_pretrained``; every rank makes the call."""
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        directory = self.args.output_dir if output_dir is None else output_dir
        if self.args.should_save:
            os.makedirs(directory, exist_ok=True)
        save_weights(self.model, directory)
        if not self.args.should_save:
            return
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processor is not None:
            processor.save_pretrained(directory)
        torch.save(self.args, os.path.join(directory, "training_args.bin"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        mw.save_optimizer(self.model, self.optimizer, os.path.join(output_dir, OPTIMIZER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))
            save_progress(
                output_dir,
                self._runtime,
                self._train_loader,
                global_batch=self._global_batch(),
                epoch_draws=self._epoch_draws,
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._distribute()
        load_weights(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        logger.info("loading the best model, from %s (%s)", self.state.best_model_checkpoint, self.state.best_metric)
        load_weights(self.model, self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint, OPTIMIZER)
        if folder.is_dir():
            mw.load_optimizer(self.model, self.optimizer, folder)
        else:
            logger.warning("%s has no %s, so the optimizer starts without state", checkpoint, OPTIMIZER)
        scheduler = Path(checkpoint, SCHEDULER)
        if scheduler.is_file():
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))
        streams = read_progress(checkpoint).get("streams")
        if self._runtime.streams is not None and streams is not None:
            self._runtime.streams.load_state_dict(streams)

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the epoch and batch to resume at, also if the rows per step have changed since the checkpoint."""
        epoch, steps = super()._init_training_state(max_steps, *args, **kwargs)  # type: ignore[misc]
        checkpoint = kwargs.get("resume_from_checkpoint", args[2] if len(args) > 2 else None)
        progress = read_progress(checkpoint) if checkpoint else {}
        is_same_size = progress.get("loader") is None or progress["global_batch"] == self._global_batch()
        if is_same_size or self.args.ignore_data_skip:
            return epoch, steps
        return place_in_epoch(progress, batch=self._global_batch(), accumulation=self.args.gradient_accumulation_steps)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        skipped, checkpoint = kwargs["steps_trained_in_current_epoch"], kwargs["resume_from_checkpoint"]
        loader, is_first = kwargs["train_dataloader"], kwargs["epoch"] == kwargs["epochs_trained"]
        self._epoch_draws = torch.get_rng_state()
        if is_first and checkpoint and skipped and isinstance(loader, DistributedLoader):
            loader.set_epoch(kwargs["epoch"])
            progress = read_progress(checkpoint)
            self._epoch_draws = progress.get("epoch_draws", self._epoch_draws)
            kwargs["train_dataloader"] = rest_of_epoch(
                loader, progress.get("loader"), draws=self._epoch_draws, skipped=skipped
            )
        super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def _global_batch(self) -> int:
        return self._train_batch_size * self._runtime.dp.size
