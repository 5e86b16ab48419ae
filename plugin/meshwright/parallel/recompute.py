"""Recomputation of layers in backward, which transformers' models do themselves."""

from __future__ import annotations

from typing import Any

from torch import nn


def can_recompute(model: nn.Module) -> bool:
    """Whether a model can compute its layers again in backward."""
    return _switch(model) is not None


def recompute_layers(model: nn.Module) -> None:
    """Make a model, for which ``can_recompute`` holds, compute its layers again in backward."""
    _switch(model)({"use_reentrant": False})


def _switch(model: nn.Module) -> Any:
    """The method of transformers' models that turns recomputation on; its older name is deprecated."""
    old = getattr(model, "gradient_checkpointing_enable", None)
    return getattr(model, "activation_checkpointing_enable", old)
