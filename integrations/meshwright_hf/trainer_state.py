"""Reads and writes the weights of a Trainer checkpoint, and the positions of the data and the dropout masks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import meshwright as mw
from meshwright.data.loader import DistributedLoader
from meshwright.faults.together import on_first_rank
from meshwright.optim.runtime import Runtime

OPTIMIZER = "meshwright_optimizer"
PROGRESS = "meshwright_progress.pt"
SCHEDULER = "scheduler.pt"
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


def save_progress(
    directory: str,
    runtime: Runtime,
    loader: DistributedLoader | None,
    *,
    global_batch: int,
    epoch_draws: Tensor | None,
) -> None:
    """Write the positions of the data and the dropout masks; they are equal on all ranks, so only one rank calls this.

    Args:
        global_batch: the rows of all ranks in one forward pass.
        epoch_draws: torch's random state when the epoch began.
    """
    state: dict[str, Any] = {"global_batch": global_batch, "loader": None if loader is None else loader.state_dict()}
    if epoch_draws is not None:
        state["epoch_draws"] = epoch_draws
    if runtime.streams is not None:
        state["streams"] = runtime.streams.state_dict()
    torch.save(state, os.path.join(directory, PROGRESS))


def read_progress(directory: str) -> dict[str, Any]:
    """Return the state that ``save_progress`` wrote; an empty dict if the checkpoint has none."""
    path = Path(directory, PROGRESS)
    return torch.load(path, weights_only=True) if path.is_file() else {}


def place_in_epoch(progress: dict[str, Any], *, batch: int, accumulation: int) -> tuple[int, int]:
    """Return the epoch and the number of its finished batches, for a batch size that may differ from the saved run's.

    Raises:
        ValueError: if the saved position is inside a step of the new size.
    """
    epoch, samples = progress["loader"]["epoch"], progress["loader"]["samples"]
    if samples == progress["loader"].get("length"):
        return epoch + 1, 0
    if samples % (batch * accumulation):
        raise ValueError(
            f"the checkpoint was saved after {samples} rows of epoch {epoch}, in steps of other sizes; this position "
            f"is inside a step of {batch} x {accumulation} rows; choose per_device_train_batch_size and "
            "gradient_accumulation_steps so that a step divides it, or set ignore_data_skip=True"
        )
    return epoch, samples // batch


def save_weights(model: Any, directory: str) -> None:
    """Write one-device weights, and the config if the model has one; every rank makes the call."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(directory)
        return
    weights = mw.full_state_dict(model)
    on_first_rank(lambda: save_file(weights, Path(directory, "model.safetensors"), metadata={"format": "pt"}))


def load_weights(model: nn.Module, directory: str) -> None:
    """Read a checkpoint's weights, or its adapter's, into a distributed model in place."""
    if any(Path(directory, name).is_file() for name in _ADAPTERS):
        _load_adapter(model, directory)
    else:
        mw.load_weights(model, directory)


@torch.no_grad()
def _load_adapter(model: Any, directory: str) -> None:
    from peft.utils.save_and_load import load_peft_weights  # only a model with adapters needs peft

    weights = load_peft_weights(directory, device="cpu")
    adapter = model.active_adapter
    read = set()
    for name, parameter in model.named_parameters():
        if (key := name.replace(f".{adapter}", "")) in weights:
            parameter.copy_(weights[key])  # a shard copies its own part of the whole tensor
            read.add(key)
    if unused := sorted(weights.keys() - read):
        raise mw.CheckpointError(
            f"{directory} has {len(unused)} adapter weight(s) that the adapter {adapter!r} lacks, the first "
            f"{unused[0]!r}; build the model with the adapter config of the checkpoint"
        )
