"""Turn on recomputation of layers in backward, which transformers' models implement."""

from __future__ import annotations

from typing import Any

from torch import nn


def can_recompute(model: nn.Module) -> bool:
    """Return whether a model can recompute its layers in backward."""
    return _switch(model) is not None


def recompute_layers(model: nn.Module) -> None:
    """Make a model recompute its layers in backward; ``can_recompute(model)`` must be True."""
    _switch(model)({"use_reentrant": False})


def _switch(model: nn.Module) -> Any:
    """Return the method that turns recomputation on, under its new or its deprecated name, or None."""
    old = getattr(model, "gradient_checkpointing_enable", None)
    return getattr(model, "activation_checkpointing_enable", old)
