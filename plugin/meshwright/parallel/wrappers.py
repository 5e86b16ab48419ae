"""Recognises modules that another library has distributed by a class of its own."""

from __future__ import annotations

from torch import nn

_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}


def wrapper_of(module: nn.Module) -> str | None:
    """Return the name of the class that distributes a module; None if there is none."""
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS), None)
