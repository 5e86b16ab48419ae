"""Recomputation of layers in backward, which transformers' models do themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def recompute_switch(model: nn.Module) -> Any:
    """The method of transformers' models that turns recomputation on; its older name is deprecated."""
    old = getattr(model, "gradient_checkpointing_enable", None)
    return getattr(model, "activation_checkpointing_enable", old)


def in_backward() -> bool:
    """Whether a backward pass is under way, in which a layer runs for its recomputation only."""
    return torch._C._current_graph_task_id() != -1
