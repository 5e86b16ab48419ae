"""The manifest of a saved optimizer, ``optimizer.json``, which holds everything except the tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.checkpoint.read_files import read_json
from meshwright.errors import CheckpointError

NAME = "optimizer.json"
_FORMAT = "meshwright-optimizer-1"


@dataclass(frozen=True, kw_only=True)
class OptimizerManifest:
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
        try:
            with staged.open("w", encoding="utf-8") as file:
                json.dump(asdict(self), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(staged, folder / NAME)
        except OSError:
            staged.unlink(missing_ok=True)
            raise

    @staticmethod
    def read(folder: Path) -> OptimizerManifest:
        """Read the manifest of a folder.

        Raises:
            CheckpointError: if the manifest is missing or damaged.
        """
        path = folder / NAME
        try:
            path.lstat()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"there is no optimizer state in {folder}: it has no {NAME}; name a folder that "
                "meshwright.save_optimizer wrote"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        fields = read_json(path, has_nan=True)
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            raise CheckpointError(f"{path} is damaged, or not of the format {_FORMAT}")
        return OptimizerManifest.of(fields, str(path))

    @staticmethod
    def of(fields: dict[str, Any], where: str) -> OptimizerManifest:
        """Return the manifest with these fields, as JSON gives them.

        Raises:
            CheckpointError: if a field is unknown, missing or of another type; it names the field and ``where``.
        """
        if fields.keys() != _FIELDS.keys():
            wrong = ", ".join(sorted(fields.keys() ^ _FIELDS.keys()))
            raise CheckpointError(f"{where} is damaged: fields that are missing, or unknown: {wrong}")
        try:
            wrong_fields = [name for name, is_right in _FIELDS.items() if not is_right(fields[name])]
        except RecursionError as error:
            raise CheckpointError(f"{where} is damaged: its values are nested too deeply") from error
        if wrong_fields:
            raise CheckpointError(f"{where} is damaged: {wrong_fields[0]!r} has values of a wrong type")
        return OptimizerManifest(**fields)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _table(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def is_encoded(value: Any) -> bool:
    """Whether :func:`decode` takes a value."""
    if not isinstance(value, dict):
        return value is None or isinstance(value, bool | int | float | str)
    if "tensor" in value:
        dtype = getattr(torch, value["dtype"], None) if isinstance(value.get("dtype"), str) else None
        is_number = type(value["tensor"]) in (bool, int, float)
        if not (is_number and isinstance(dtype, torch.dtype) and value.get("shape") in ([], [1], [1, 1])):
            return False
        try:
            torch.tensor(value["tensor"], dtype=dtype)
        except (RuntimeError, TypeError, ValueError, OverflowError):  # a number that the dtype does not hold
            return False
        return True
    return len(value) == 1 and all(
        (kind in ("tuple", "list") and isinstance(items, list) and all(map(is_encoded, items)))
        or (kind == "dict" and isinstance(items, dict) and all(map(is_encoded, items.values())))
        or (kind == "table" and isinstance(items, list) and all(_is_pair(item) for item in items))
        for kind, items in value.items()
    )


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and type(value[0]) is int and is_encoded(value[1])


def _is_group(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"parameters", "options"}
        and _is_texts(value["parameters"])
        and _table(is_encoded)(value["options"])
    )


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "optimizer": lambda value: isinstance(value, str),
    "shapes": _table(_is_shape),
    "groups": lambda value: isinstance(value, list) and all(map(_is_group, value)),
    "tensors": _table(_is_texts),
    "values": _table(_table(is_encoded)),
    "masters": _is_texts,
    "weight_map": _table(lambda value: isinstance(value, str)),
}


def state_key(name: str, key: str) -> str:
    """A state tensor's name in the files."""
    return f"state/{name}/{key}"


def master_key(name: str) -> str:
    """A master weight's name in the files."""
    return f"master/{name}"


def sync_folder(folder: Path) -> None:
    """Flush the file names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def encode(value: Any, what: str) -> Any:
    """Encode a number, text, tuple, dict or the like as JSON.

    Raises:
        CheckpointError: if the value cannot be saved; it names ``what``.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, tuple | list):
        return {"tuple" if isinstance(value, tuple) else "list": [encode(x, what) for x in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(x, f"{what}[{key!r}]") for key, x in value.items()}}
    if isinstance(value, dict) and all(type(key) is int for key in value):
        return {"table": [[key, encode(x, f"{what}[{key}]")] for key, x in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{what} is a {type(value).__name__}, which cannot be saved; numbers, texts and tensors can")


def decode(value: Any) -> Any:
    """The inverse of :func:`encode`."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"])).view(value["shape"])
    ((kind, items),) = value.items()
    if kind == "dict":
        return {key: decode(x) for key, x in items.items()}
    if kind == "table":
        return {key: decode(x) for key, x in items}
    return {"tuple": tuple, "list": list}[kind](decode(x) for x in items)
