"""The manifest of a saved optimizer, ``optimizer.json``, which holds everything except the tensors."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import CheckpointError

NAME = "optimizer.json"
_FORMAT = "meshwright-optimizer-1"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A saved optimizer, whose parameters have their one-device names.

    Args:
        optimizer: the name of the optimizer's class.
        shapes: the one-device shape of each parameter.
        groups: the parameter names and the (encoded) options of each group.
        tensors: the keys of each parameter's state that is a tensor.
        values: each parameter's (encoded) state that is not a tensor.
        masters: the parameters whose float32 master weights were saved.
        weight_map: the file of each tensor, as in an index of safetensors files.
        format: the format of this file.
    """

    optimizer: str
    shapes: dict[str, list[int]]
    groups: list[dict[str, Any]]
    tensors: dict[str, list[str]]
    values: dict[str, dict[str, Any]]
    masters: list[str]
    weight_map: dict[str, str]
    format: str = _FORMAT

    def write(self, folder: Path) -> None:
        """Replace the manifest of a folder in one step; the files that it lists must already be on disk."""
        staged = folder / f".{NAME}.saving"
        with staged.open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, folder / NAME)
        sync_folder(folder)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read the manifest of a folder.

        Raises:
            CheckpointError: if the manifest is missing or damaged.
        """
        path = folder / NAME
        try:
            manifest = Manifest(**json.loads(path.read_text(encoding="utf-8")))
            is_sound = manifest.format == _FORMAT and all(
                {"parameters", "options"} <= g.keys() for g in manifest.groups
            )
        except FileNotFoundError as error:
            raise CheckpointError(
                f"there is no optimizer state in {folder}: it has no {NAME}; name a folder that "
                "meshwright.save_optimizer wrote"
            ) from error
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read, or is damaged: {error}") from error
        if not is_sound:
            raise CheckpointError(f"{path} is not of the format {_FORMAT}")
        return manifest


def state_key(name: str, key: str) -> str:
    """Return a state tensor's name in the files."""
    return f"state/{name}/{key}"


def master_key(name: str) -> str:
    """Return a master weight's name in the files."""
    return f"master/{name}"


def sync_folder(folder: Path) -> None:
    """Flush the file names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def encode(value: Any, what: str) -> Any:
    """Return a number, string, list, tuple, None or one-element tensor in a form that JSON can hold.

    Raises:
        CheckpointError: if the value cannot be saved; the message begins with ``what``.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [encode(x, what) for x in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{what} is a {type(value).__name__}, which cannot be saved; numbers and tensors can")


def decode(value: Any) -> Any:
    """Return the value that :func:`encode` was given."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"])).view(value["shape"])
    ((kind, items),) = value.items()
    return {"tuple": tuple, "list": list}[kind](decode(x) for x in items)
