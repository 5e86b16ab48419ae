"""The Trainer's checkpoint folders, and the parts of a checkpoint that are read and written there."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerState
from transformers.trainer_pt_utils import safe_globals

import meshwright as mw
from meshwright.checkpoint.files.local_disk import restore_replaced
from meshwright.checkpoint.files.place import local_path
from meshwright.checkpoint.files.reading import read_json
from meshwright.checkpoint.format.object_states import check_states_of_others
from meshwright.checkpoint.one_device.stock_optimizer import check_pickle, read_pickle
from meshwright.checkpoint.one_device.weight_files import WeightFiles
from meshwright.checkpoint.sealed import NAME as SEAL
from meshwright.checkpoint.sealed import SealedFolders, check_seal
from meshwright.data.readers.base import MOST_EPOCHS
from meshwright.data.shuffling import GENERATOR, decoded, encoded
from meshwright.errors import CheckpointError
from meshwright.faults.together import on_first_rank, succeed_together, texts_of_all
from meshwright.layout.tensor_layout import is_held
from meshwright.outside_files import anything, integer, listed, maybe, number, record, require, table, text
from meshwright.parallel.dropout_streams import STREAMS
from meshwright_hf.launch.job import RESTARTED_VARIABLE, RESUME_VARIABLE

OPTIMIZER = "meshwright_optimizer"
PROGRESS = "meshwright_progress.json"
SCHEDULER = "scheduler.pt"
STATE = "trainer_state.json"
STOCK_OPTIMIZER = "optimizer.pt"
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_RANDOM = re.compile(r"rng_state(_\d+)?\.pth")


@dataclass(frozen=True, kw_only=True)
class TrainerProgress:
    """The positions of the data and the dropout masks, which are equal on all ranks.

    Args:
        mesh: the sizes of the axes pp, dp and tp, and of cp if it is above 1.
        global_batch: the rows of all ranks in one forward pass.
        loader: the state of the training loader; None if it is not on the mesh.
        epoch_draws: torch's random state when the epoch began, encoded; None if no epoch has begun.
        streams: the positions of the dropout masks; None without them.
        plan: the fields of the plan; None in checkpoints of earlier versions.
    """

    mesh: tuple[int, ...]
    global_batch: int
    loader: dict[str, Any] | None
    epoch_draws: str | None
    streams: dict[str, int] | None
    plan: dict[str, Any] | None = None

    def write(self, folder: str | Path) -> None:
        """Write ``meshwright_progress.json``."""
        text = json.dumps(asdict(self)) + "\n"
        Path(folder, PROGRESS).write_text(text, encoding="utf-8")

    @staticmethod
    def read(folder: str | Path) -> TrainerProgress | None:
        """Read ``meshwright_progress.json``; a checkpoint of the stock Trainer has none, and gives None.

        Raises:
            CheckpointError: if a field is missing, unknown, or of another type or range.
        """
        path = Path(folder, PROGRESS)
        if not path.exists():
            return None
        progress = read_json(path)
        require(progress, _PROGRESS, path)
        mesh = progress["mesh"]
        # An earlier version had no pp.
        return TrainerProgress(**{**progress, "mesh": tuple(mesh) if len(mesh) > 2 else (1, *mesh)})

    def draws(self) -> Tensor | None:
        """Return torch's random state when the epoch began."""
        return None if self.epoch_draws is None else decoded(self.epoch_draws)


# ``loader`` is checked by the loader, and its place here, since the Trainer reads it.
_PLACE = record({"epoch": integer(0, MOST_EPOCHS), "samples": integer()}, {"length": integer()})


def _loader(value: Mapping[str, object], field: str) -> None:
    table(anything)(value, field)
    _PLACE({name: value[name] for name in ("epoch", "samples", "length") if name in value}, field)


_PROGRESS = record(
    {
        "mesh": listed(integer(1, 2**24), least=2, most=4),
        "global_batch": integer(1),
        "loader": maybe(_loader),
        "epoch_draws": maybe(GENERATOR),
        "streams": maybe(STREAMS),
    },
    {"plan": maybe(table(anything))},
)


def encoded_draws(state: Tensor | None) -> str | None:
    """Return a random state as :class:`TrainerProgress` keeps it."""
    return None if state is None else encoded(state)


def random_files(folder: str | Path) -> list[str]:
    """Return the names of the files with the ranks' random states."""
    return sorted(path.name for path in Path(folder).iterdir() if _RANDOM.fullmatch(path.name))


def check_trainer_state(path: Path) -> None:
    """Check ``trainer_state.json``, which transformers reads unchecked.

    Raises:
        CheckpointError: if a field is unknown to this version of transformers, or of another type or range.
    """
    # Of any size, since transformers reads it whole too: a long run has logged much.
    state = read_json(path, allowance=sys.maxsize)
    known = {field.name: anything for field in fields(TrainerState)}
    require(state, record({}, {**known, **_STATE}), path)


_STATE = {
    "epoch": maybe(number(0)),
    **dict.fromkeys(("global_step", "num_input_tokens_seen"), integer()),
    **dict.fromkeys(("max_steps", "num_train_epochs"), integer(0, sys.maxsize)),
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps", "total_flos"), maybe(number(0))),
    **dict.fromkeys(("train_batch_size", "best_global_step"), maybe(integer())),
    "best_metric": maybe(number(is_finite=False)),
    "best_model_checkpoint": maybe(text(most=4096)),
    "log_history": maybe(listed(table(anything))),
    "stateful_callbacks": maybe(table(anything)),
}


def read_random(path: Path) -> dict[str, Any]:
    """Read the random states of a rank, and check them, since transformers restores them unchecked.

    Raises:
        CheckpointError: if they are damaged.
    """
    with safe_globals():
        state = read_pickle(path)
    check_states_of_others(state, ("python", "numpy", "cpu"), path)
    return dict(state)


def load_random_state_of_first(folder: str | Path, device: torch.device) -> None:
    """Give this rank the random states that rank 0 saved, on another number of ranks or another mesh.

    Raises:
        CheckpointError: if they are missing or damaged.
    """
    path = Path(folder, "rng_state.pth")
    path = path if path.exists() else path.with_name("rng_state_0.pth")
    state = read_random(path)
    try:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.random.set_rng_state(state["cpu"])
        if device.type == "cuda":
            on_device = state["cuda"]
            torch.cuda.set_rng_state(on_device[0] if isinstance(on_device, list) else on_device, device)
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged, or was saved on another kind of device: {error!r}") from error


def place_in_epoch(loader: dict[str, Any], *, batch: int, accumulation: int) -> tuple[int, int]:
    """Return the epoch and the number of its finished batches, for a batch size that may differ from the saved run's.

    Args:
        loader: the state of the training loader.
        batch: the rows of all ranks in one forward pass.
        accumulation: the number of forward passes in a step.

    Raises:
        ValueError: if the saved position is inside a step of the new size.
    """
    epoch, samples = loader["epoch"], loader["samples"]
    if samples == loader.get("length"):
        return epoch + 1, 0
    if samples % (batch * accumulation):
        raise ValueError(
            f"the checkpoint was saved after {samples} rows of epoch {epoch}, in steps of other sizes; this position "
            f"is inside a step of {batch} x {accumulation} rows; choose per_device_train_batch_size and "
            "gradient_accumulation_steps so that a step divides it, or set ignore_data_skip=True"
        )
    return epoch, samples // batch


def save_weights(model: PreTrainedModel, directory: str) -> None:
    """Write one-device weights, and the config if the model has one; every rank makes the call."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(directory)
    else:
        mw.save_weights(model, directory)


def load_weights(model: nn.Module, directory: str) -> None:
    """Read a checkpoint's weights, or its adapter's, into a distributed model in place."""
    if any(Path(directory, name).is_file() for name in ADAPTERS):
        _load_adapter(model, directory)
    else:
        mw.load_weights(model, directory)


@torch.no_grad()
def _load_adapter(model: nn.Module, directory: str) -> None:
    from peft.utils.save_and_load import load_peft_weights  # only a model with adapters needs peft

    weights = load_peft_weights(directory, device="cpu")
    adapter = model.active_adapter
    read = set()
    for name, parameter in model.named_parameters():
        if (key := name.replace(f".{adapter}", "")) in weights:
            if is_held(parameter):
                parameter.copy_(weights[key])  # a shard copies its own part of the whole tensor
            read.add(key)
    if unused := sorted(weights.keys() - read):
        raise mw.CheckpointError(
            f"{directory} has {len(unused)} adapter weight(s) that the adapter {adapter!r} lacks, the first "
            f"{unused[0]!r}; build the model with the adapter config of the checkpoint"
        )


logger = logging.getLogger(__name__)


def checkpoints_in(run_dir: str | Path) -> SealedFolders:
    """Return the checkpoints of a run's folder."""
    return SealedFolders(parent=Path(run_dir), name=re.compile(r"checkpoint-\d+"))


def checkpoint_to_resume(output_dir: str, wanted: bool | str | os.PathLike[str] | None) -> str | None:
    """Return the folder to resume from, which is whole; every rank must make the call.

    Args:
        output_dir: the Trainer's folder.
        wanted: the argument of ``train``: a folder, True for the newest whole checkpoint in ``output_dir``, or None for
            the folder of ``meshwright launch --resume``, if there is one.
            After a restart by ``meshwright launch`` it is the newest whole checkpoint that the launch has saved, if
            there is one, unless ``wanted`` is False.

    Raises:
        CheckpointError: if there is no whole checkpoint, or the folder is not one; it names what is wrong.
    """
    if wanted is not False and (launches := _restarted_launch()):
        folder, _ = checkpoints_in(output_dir).newest_whole(_check, launches)
        if folder is not None:
            on_first_rank(lambda: logger.warning("restarted by the launcher: the run goes on from %s", folder))
            return os.path.join(output_dir, folder.name)
    if wanted is None:
        wanted = os.environ.get(RESUME_VARIABLE)
    if wanted is None or wanted is False:
        return None
    if wanted is not True:
        path = local_path(wanted, "resume_from_checkpoint")
        on_first_rank(lambda: restore_replaced(path.parent))
        _check(path)
        return os.fspath(wanted)
    folder, skipped = checkpoints_in(output_dir).newest_whole(_check)
    if folder is not None:
        return os.path.join(output_dir, folder.name)
    found = "\n  ".join(["; these are not whole:", *skipped]) if skipped else ""
    raise CheckpointError(f"there is no whole checkpoint in {output_dir} to resume from{found}")


def _restarted_launch() -> set[str]:
    """Return the names of the launch on its machines, if it has restarted this job; a machine may have joined later."""
    return {*texts_of_all(os.environ.get(RESTARTED_VARIABLE, ""))} - {""}


def is_sealed(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of MeshwrightTrainer, not of the stock Trainer.

    Raises:
        CheckpointError: if MeshwrightTrainer wrote it, but its seal is missing.
    """
    if (folder / SEAL).exists():
        return True
    if ours := [name for name in (OPTIMIZER, PROGRESS) if (folder / name).exists()]:
        raise CheckpointError(
            f"{folder} has {ours[0]}, but no {SEAL}, so it is not whole, or an older version saved it; resume from "
            "another checkpoint"
        )
    return False


def _check(folder: Path) -> None:
    """Raise on every rank if a run cannot be resumed from a folder."""
    if succeed_together(lambda: _is_sealed_folder(folder)):
        check_seal(folder)
        required: tuple[str, ...] = (STATE, SCHEDULER, PROGRESS, f"{OPTIMIZER}/optimizer.json")
    else:
        required = (STATE, SCHEDULER, STOCK_OPTIMIZER)
    succeed_together(lambda: _check_parts(folder, required))
    if STOCK_OPTIMIZER in required:
        for name in (SCHEDULER, STOCK_OPTIMIZER, *random_files(folder)):
            check_pickle(folder / name)


def _is_sealed_folder(folder: Path) -> bool:
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint at {folder}")
    return is_sealed(folder)


def _check_parts(folder: Path, required: tuple[str, ...]) -> None:
    missing = [name for name in required if not (folder / name).is_file()]
    if not random_files(folder):
        missing.append("rng_state.pth")
    if missing:
        raise CheckpointError(
            f"{folder} has no {', '.join(missing)}, so the resumed run would give other results. It is not whole, or "
            "was saved with save_only_model=True or by another engine. Resume from another checkpoint; to start a new "
            f"run from these weights, call meshwright.load_weights(trainer.model, {str(folder)!r}) before train()"
        )
    check_trainer_state(folder / STATE)
    if not any((folder / name).is_file() for name in ADAPTERS):
        WeightFiles.open(folder)
