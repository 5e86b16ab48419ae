"""Checks and loads the saved states of a scheduler, a scaler and a loader."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.optimizer_manifest import decode
from meshwright.errors import CheckpointError
from meshwright.schema import Check, anything, integer, listed, number, require, shown, table

_RATES = listed(number(0, 1e9))
# Entries of the states of torch's schedulers and its gradient scaler. Others must be of the kind that the object has.
_RANGES: Mapping[str, Mapping[str, Check]] = {
    "scheduler": {"base_lrs": _RATES, "_last_lr": _RATES, "last_epoch": integer(-1), "_step_count": integer()},
    "scaler": dict.fromkeys(("scale", "growth_factor", "backoff_factor", "growth_interval"), number(0)),
}


def check_states(path: Path, manifest: Manifest, objects: Mapping[str, Any]) -> None:
    """Check the states in a manifest against the objects that they will be loaded into, which stay as they are.

    Args:
        path: the file of the manifest.
        manifest: the manifest.
        objects: the objects, by their names in the manifest.

    Raises:
        CheckpointError: if a state is of another kind of object, or an entry has a wrong type or range. The message
            names the file and the entry.
    """
    for name in _RANGES.keys() & objects.keys():
        saved = decode(getattr(manifest, name))
        require(saved, table(anything), f"{path}: its {name!r}")
        own = objects[name].state_dict()
        for key in sorted(saved.keys() & own.keys()):
            where = f"{path}: {key!r} of its {name!r}"
            if key in _RANGES[name] and own[key] is not None:
                require(saved[key], _RANGES[name][key], where)
            elif None not in (saved[key], own[key]) and _kind(saved[key]) != _kind(own[key]):
                raise CheckpointError(
                    f"{where} is {shown(saved[key])}, and a {_kind(own[key])} in this {type(objects[name]).__name__}; "
                    "load another checkpoint"
                )
    check = getattr(objects.get("loader"), "check_state_dict", None)
    if callable(check):
        try:
            check(manifest.loader)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: 'loader': {error}") from error


def load_states(path: Path, manifest: Manifest, objects: Mapping[str, Any]) -> None:
    """Give objects the states that :func:`check_states` has checked.

    Raises:
        CheckpointError: if an object does not take its state.
    """
    for name in ("scheduler", "scaler", "loader"):
        if name in objects:
            saved = getattr(manifest, name)
            try:
                objects[name].load_state_dict(saved if name == "loader" else decode(saved))
            except Exception as error:  # of any program's own class
                raise CheckpointError(
                    f"{path}: the {type(objects[name]).__name__} does not take the state of '{name}': "
                    f"{type(error).__name__}: {error}. Load a checkpoint of the same program, or pass ignore=[{name!r}]"
                ) from error


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "truth value"
    if isinstance(value, int | float | Tensor):
        return "number"
    if isinstance(value, list | tuple):
        return "sequence"
    return "table" if isinstance(value, Mapping) else type(value).__name__
