"""Recomputation of layers in backward, which transformers' models do themselves."""

from __future__ import annotations

from typing import Any

from torch import nn


def recompute_switch(model: nn.Module) -> Any:
    """The method of transformers' models that turns recomputation on; its older name is deprecated."""
    old = getattr(model, "gradient_checkpointing_enable", None)
    return getattr(model, "activation_checkpointing_enable", old)
