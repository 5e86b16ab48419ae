"""Heads that score sequences, tokens or spans: one small layer after the final norm, where each rank has all tokens."""

from __future__ import annotations

from typing import Any

from torch import nn

from meshwright.roles.projection import is_projection
from meshwright.roles.sharding_plan import Role, ShardingPlan

# The names in transformers. PEFT keeps the trained copy of such a layer beside the original.
_NAMES = ("score", "classifier", "qa_outputs")
_COPIES = ("", ".original_module", ".modules_to_save.default")


def fitted(plan: ShardingPlan, model: nn.Module) -> ShardingPlan:
    """Return a family's plan for its causal LM, adapted to a model of that family with another head.

    Args:
        plan: the family's plan; the names of its decoder's modules begin with "model.".
        model: the model, which keeps the decoder under ``base_model_prefix`` and the head beside it.
    """
    modules = dict(model.named_modules())
    names = [name + copy for name in _NAMES for copy in _COPIES]
    heads = {name: Role.WHOLE for name in names if name in modules and is_projection(modules[name])}
    prefix: Any = getattr(model, "base_model_prefix", "model")
    moves = prefix != "model" and prefix in modules and "model" not in modules
    if not heads and not moves:
        return plan
    roles = {
        f"{prefix}.{name.removeprefix('model.')}" if moves and name.startswith("model.") else name: role
        for name, role in plan.roles.items()
    }
    return ShardingPlan(roles={**heads, **roles}, source=plan.source)
