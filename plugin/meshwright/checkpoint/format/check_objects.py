"""Checks the types of the arguments of ``save_checkpoint`` and ``load_checkpoint``, which may be in another order."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from meshwright.errors import CheckpointError


def check_objects(call: str, folder: Any, model: Any, optimizer: Any) -> None:
    """Raise if an argument has the type of another one.

    Args:
        call: the name of the function that was called.
        folder, model, optimizer: its first three arguments.

    Raises:
        CheckpointError: if a type is wrong; the message names the argument and the order.
    """
    wrong = None
    if not isinstance(folder, str | os.PathLike):
        wrong = f"folder is {_kind(folder)}, not a path"
    elif not isinstance(model, nn.Module):
        wrong = f"model is {_kind(model)}, not a module"
    elif optimizer is not None and not hasattr(optimizer, "param_groups"):  # engines wrap theirs in other classes
        wrong = f"optimizer is {_kind(optimizer)}, not an optimizer"
    if wrong is not None:
        raise CheckpointError(f"{wrong}; write mw.{call}(folder, model, optimizer, ...)")


def _kind(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
