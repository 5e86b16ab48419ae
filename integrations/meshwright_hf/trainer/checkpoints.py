"""Saves and resumes the Trainer's checkpoints as one-device files, which every plan can read.

A checkpoint is written to a hidden folder, sealed, and renamed: ``checkpoint-N`` exists whole or not at all.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.checkpoint.files.place import local_path
from meshwright.checkpoint.files.reading import Lineage, Mark
from meshwright.checkpoint.format.load_checkpoint import show_loaded
from meshwright.checkpoint.format.object_states import check_state_of
from meshwright.checkpoint.one_device.stock_optimizer import load_stock_optimizer, read_pickle
from meshwright.checkpoint.sealed import NAME as SEAL
from meshwright.checkpoint.sealed import check_seal, close_seal, sealed_folder
from meshwright.data.loader import DistributedLoader
from meshwright.errors import CheckpointError
from meshwright.faults.together import on_first_rank, succeed_together
from meshwright.mesh.rank_grid import AXES
from meshwright.optim.runtime import Runtime, runtime_of
from meshwright.parallel.dropout_streams import DropoutStreams
from meshwright.temporarily import temporarily
from meshwright_hf.launch.job import LAUNCH_VARIABLE
from meshwright_hf.trainer.checks import StockTrainer
from meshwright_hf.trainer.control import Control
from meshwright_hf.trainer.data import rest_of_epoch
from meshwright_hf.trainer.folders import (
    OPTIMIZER,
    SCHEDULER,
    STATE,
    STOCK_OPTIMIZER,
    TrainerProgress,
    checkpoint_to_resume,
    checkpoints_in,
    encoded_draws,
    is_sealed,
    load_random_state_of_first,
    load_weights,
    place_in_epoch,
    random_files,
    read_random,
    save_weights,
)

logger = logging.getLogger(__name__)


class CheckpointMixin(StockTrainer):
    """Overrides the Trainer's methods that save and resume."""

    _train_batch_size: int
    _distribute: Callable[[], None]

    _agreed: Control
    _train_loader: DistributedLoader | None = None
    _epoch_draws: Tensor | None = None  # torch's random state when the epoch began; samplers draw the order from it
    _hidden_run: Path | None = None  # the folder that stands for the run's folder while a checkpoint is written
    _calls_on_save = False  # whether callbacks are told of a checkpoint once it is saved
    _open: Path | None = None  # the checkpoint to which callbacks may be adding files
    _push: Path | None = None  # the checkpoint that is to be pushed

    @property
    def _runtime(self) -> Runtime:
        return runtime_of(self.model)

    # ---- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write one-device weights and all other files for ``from_pretrained``; every rank makes the call."""
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        directory = self.args.output_dir if output_dir is None else output_dir
        local_path(directory, "save_model")
        on_first_rank(lambda: os.makedirs(directory, exist_ok=True))
        save_weights(self.model, directory)
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)

        def save_rest() -> None:
            if processor is not None:
                processor.save_pretrained(directory)
            torch.save(self.args, os.path.join(directory, "training_args.bin"))

        on_first_rank(save_rest)

    def _get_output_dir(self, trial: object) -> str:
        if self._hidden_run is not None:
            return str(self._hidden_run)
        run_dir: str = super()._get_output_dir(trial)  # type: ignore[misc]
        return run_dir

    def _save_checkpoint(self, model: nn.Module, trial: object = None) -> None:
        """Save a checkpoint by the Trainer's method, in a hidden folder that becomes ``checkpoint-N`` at the end."""
        run_dir = self._get_output_dir(trial)
        target = Path(run_dir, f"checkpoint-{self.state.global_step}")
        self._push = None
        lineage, launch = Lineage.of(self.model), os.environ.get(LAUNCH_VARIABLE, "")
        with sealed_folder(
            target, lineage=lineage, launch=launch, is_ours=lambda _: True, is_open=self._calls_on_save
        ) as folder:
            with temporarily(self, _hidden_run=folder.parent):
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
            self._name_finally(folder, os.path.join(run_dir, target.name))
        if self._calls_on_save:
            self._open = target
        else:
            self._push_what_is_due()
        limit, kept = self.args.save_total_limit, filter(None, (str(target), self.state.best_model_checkpoint))
        if limit and limit > 0:
            folders = checkpoints_in(run_dir)
            on_first_rank(lambda: folders.remove_oldest(limit, lineage.run, "save_total_limit", [*kept]))

    def _name_finally(self, folder: Path, final: str) -> None:
        """Replace the hidden folder's name by the final one in the Trainer's state."""
        if self._push is not None:
            self._push = Path(final)
        if self.state.best_model_checkpoint == str(folder):
            self.state.best_model_checkpoint = final
            if self.args.should_save:
                self.state.save_to_json(str(folder / STATE))

    def _maybe_log_save_evaluate(self, *args: object, **kwargs: object) -> None:
        self._agreed.settle(self.control)
        with temporarily(self, _calls_on_save=True):
            super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        if self._open is not None:
            checkpoint, self._open = self._open, None
            close_seal(checkpoint)  # callbacks have written their files into it
            self._push_what_is_due()
        self._agreed.leave_if_preempted()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._push = Path(checkpoint_folder)  # pushed once it has its name

    def _push_what_is_due(self) -> None:
        checkpoint, self._push = self._push, None
        if checkpoint is not None:
            super()._push_from_checkpoint(str(checkpoint))  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        mw.save_optimizer(self.model, self.optimizer, os.path.join(output_dir, OPTIMIZER))
        runtime, loader = self._runtime, self._train_loader
        streams = runtime.features.find(DropoutStreams)
        progress = TrainerProgress(
            mesh=_sizes(runtime),
            global_batch=self._global_batch(),
            loader=None if loader is None else loader.state_dict(),
            epoch_draws=encoded_draws(self._epoch_draws),
            streams=None if streams is None else streams.state_dict(),
            plan=None if runtime.plan is None else asdict(runtime.plan),
        )

        def save() -> None:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))
            progress.write(output_dir)

        on_first_rank(save)

    # ---- resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: object, **kwargs: object) -> Any:
        """Train as the Trainer does, from a checkpoint that is whole.

        Args:
            resume_from_checkpoint: a folder, or True for the newest whole checkpoint in ``output_dir``. After a restart
                by ``meshwright launch --max-restarts``, the newest whole checkpoint that this launch has saved is used
                instead; False prevents this.
            args, kwargs: the Trainer's other arguments.

        Raises:
            CheckpointError: if there is no whole checkpoint, or the folder is not one; it names what is wrong.
        """
        folder = checkpoint_to_resume(self.args.output_dir, resume_from_checkpoint)
        return super().train(folder, *args, **kwargs)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._distribute()
        load_weights(self.model, resume_from_checkpoint)
        Lineage.of(self.model).go_on_from(Mark.of(Path(resume_from_checkpoint, SEAL)))

    def _load_best_model(self) -> None:
        logger.info("loading the best model, from %s (%s)", self.state.best_model_checkpoint, self.state.best_metric)
        assert self.state.best_model_checkpoint is not None
        best = Path(self.state.best_model_checkpoint)
        is_ours = on_first_rank(lambda: best.is_dir() and is_sealed(best))
        succeed_together(lambda: _check_is_here(best, is_ours, self.args.output_dir))
        if is_ours:
            check_seal(best)
        load_weights(self.model, self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        progress = succeed_together(lambda: TrainerProgress.read(checkpoint))
        if progress is None:
            load_stock_optimizer(self.model, self.optimizer, os.path.join(checkpoint, STOCK_OPTIMIZER))
        else:
            mw.load_optimizer(self.model, self.optimizer, os.path.join(checkpoint, OPTIMIZER))
        succeed_together(lambda: self._load_scheduler(Path(checkpoint, SCHEDULER)))
        streams = self._runtime.features.find(DropoutStreams)
        if streams is not None and progress is not None and progress.streams is not None:
            streams.load_state_dict(progress.streams)

    def _load_scheduler(self, path: Path) -> None:
        state = read_pickle(path)
        check_state_of("scheduler", state, self.lr_scheduler, str(path))
        self.lr_scheduler.load_state_dict(state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore this rank's random state, or rank 0's if the mesh differs from the mesh of the save."""
        if checkpoint is None:
            return
        runtime, progress = self._runtime, succeed_together(lambda: TrainerProgress.read(checkpoint))
        is_same_mesh = progress is None or progress.mesh == _sizes(runtime)
        if is_same_mesh and len(random_files(checkpoint)) == self.args.world_size:
            own = Path(checkpoint, f"rng_state_{self.args.process_index}.pth")
            own = own if own.is_file() else own.with_name("rng_state.pth")
            succeed_together(lambda: own.is_file() and read_random(own))
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        else:
            succeed_together(lambda: load_random_state_of_first(checkpoint, self.args.device))

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the epoch and batch to resume at, also if the rows per step have changed since the checkpoint."""
        epoch, steps = super()._init_training_state(max_steps, *args, **kwargs)  # type: ignore[misc]
        checkpoint = kwargs.get("resume_from_checkpoint", args[2] if len(args) > 2 else None)
        if not checkpoint:
            return epoch, steps
        progress = succeed_together(lambda: TrainerProgress.read(checkpoint))
        show_loaded(checkpoint, step=self.state.global_step, plan=None if progress is None else progress.plan)
        if self.args.ignore_data_skip:
            return epoch, steps
        if progress is None:
            rows = (self.state.train_batch_size or 0) * len(random_files(checkpoint))
            if rows != self._global_batch():
                raise CheckpointError(
                    f"{checkpoint} of the stock Trainer was saved with batches of {rows} rows on all processes, but "
                    f"this run has batches of {self._global_batch()}, so it would go on at another place in the data; "
                    "set per_device_train_batch_size so that it has as many, or ignore_data_skip=True"
                )
        elif progress.loader is not None and progress.global_batch != self._global_batch():
            return place_in_epoch(
                progress.loader, batch=self._global_batch(), accumulation=self.args.gradient_accumulation_steps
            )
        return epoch, steps

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        skipped, checkpoint = kwargs["steps_trained_in_current_epoch"], kwargs["resume_from_checkpoint"]
        loader, is_first = kwargs["train_dataloader"], kwargs["epoch"] == kwargs["epochs_trained"]
        self._epoch_draws = torch.get_rng_state()
        if is_first and checkpoint and skipped and isinstance(loader, DistributedLoader):
            loader.set_epoch(kwargs["epoch"])
            progress = succeed_together(lambda: TrainerProgress.read(checkpoint))
            if progress is not None and (draws := progress.draws()) is not None:
                self._epoch_draws = draws
            state = None if progress is None else progress.loader
            kwargs["train_dataloader"] = rest_of_epoch(loader, state, draws=self._epoch_draws, skipped=skipped)
        super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def _global_batch(self) -> int:
        return self._train_batch_size * self._runtime.mesh.dp.size


def _check_is_here(best: Path, is_ours: bool, output_dir: str) -> None:
    if not best.is_dir() or (is_ours and not is_sealed(best)):
        raise CheckpointError(
            f"the best checkpoint {best} is not on host {socket.gethostname()}, so load_best_model_at_end cannot load "
            f"it there; set TrainingArguments(output_dir={output_dir!r}) to a folder of a disk that all hosts share"
        )


# The axes of the first checkpoints, whose sizes are always saved; another one counts only if it is used.
_FIRST_AXES = ("pp", "dp", "tp")


def _sizes(runtime: Runtime) -> tuple[int, ...]:
    sizes = {name: getattr(runtime.mesh, name).size for name in AXES}
    first = [sizes.pop(name) for name in _FIRST_AXES]
    return (*first, *(size for size in sizes.values() if size > 1))
