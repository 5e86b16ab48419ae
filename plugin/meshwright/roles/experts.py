"""Recognises the modules that hold the weights of several experts and call transformers' experts interface."""

from __future__ import annotations

from torch import nn


def is_experts(module: nn.Module) -> bool:
    """Return whether a module computes, for each token by itself, the weighted sum of what some experts return.

    The marks are those that transformers' ``use_experts_implementation`` sets on each such module.
    """
    return all(name in vars(module) for name in ("has_gate", "is_transposed", "config")) and hasattr(
        module.config, "_experts_implementation"
    )
