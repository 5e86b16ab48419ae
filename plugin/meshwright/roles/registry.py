"""Finds a model's sharding plan: the user's, its family's, or one inferred from its structure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from meshwright.errors import PlanError
from meshwright.roles.family_hints import hints_of
from meshwright.roles.infer import infer_plan
from meshwright.roles.sharding_plan import Role, ShardingPlan, decoder_roles
from meshwright.roles.task_heads import fitted
from meshwright.roles.whole_modules import leave_whole

# An example of a written plan; other families' plans are inferred from structure.
_PLANS = {"llama": ShardingPlan(roles=decoder_roles(), source="the llama plan")}

# What a model's config.json may hold: {"meshwright": {"tp": 2, ..., "roles": {"model.embed": "embedding", ...}}}.
CONFIG_KEY = "meshwright"
ROLES_KEY = "roles"


def register_plan(model_type: str, plan: ShardingPlan) -> None:
    """Use ``plan`` for models whose ``config.model_type`` is ``model_type``; the last call wins.

    Raises:
        ValueError: if ``plan`` is not a ShardingPlan.

    Example:
        >>> from meshwright.roles.sharding_plan import ShardingPlan, decoder_roles
        >>> register_plan("my_llama", ShardingPlan(roles=decoder_roles(base="decoder")))
    """
    if not isinstance(plan, ShardingPlan):
        raise ValueError(f"register_plan({model_type!r}) takes a meshwright.ShardingPlan, not {type(plan).__name__}")
    _PLANS[model_type] = plan


def plan_for(model: nn.Module) -> ShardingPlan:
    """Return the sharding plan in the model's config, else its family's, else one inferred with the family's hints.

    In an inferred plan, what has no role stays whole.

    Raises:
        PlanError: if no plan can be inferred, or the config names an unknown role.
    """
    if (written := written_plan(model)) is not None:
        return written
    return leave_whole(infer_plan(model, hints_of(model)), model)


def written_plan(model: nn.Module) -> ShardingPlan | None:
    """Return the sharding plan in the model's config, else the one registered for its family; None without one.

    Raises:
        PlanError: if the config names an unknown role.
    """
    config = getattr(model, "config", None)
    saved = getattr(config, CONFIG_KEY, None)
    if isinstance(saved, Mapping) and ROLES_KEY in saved:
        return _from_names(saved[ROLES_KEY], f'"{CONFIG_KEY}" in the config of {type(model).__name__}')
    model_type = getattr(config, "model_type", "")
    plan = fitted(_PLANS[model_type], model) if model_type in _PLANS else None
    # The layers may be inside of a program's own module, under other names.
    has_layers = plan is not None and any(plan.role_of(name) is Role.LAYER for name, _ in model.named_modules())
    return plan if has_layers else None


def _from_names(roles: Any, source: str) -> ShardingPlan:
    if not isinstance(roles, Mapping):
        raise PlanError(f"{source}: {ROLES_KEY!r} must map module names to roles, not {roles!r}")
    known = {role.name.lower(): role for role in Role}
    if unknown := [f"{module}: {name!r}" for module, name in roles.items() if name not in known]:
        raise PlanError(f"{source} has unknown roles: {', '.join(unknown)}; use one of {', '.join(known)}")
    return ShardingPlan(roles={module: known[name] for module, name in roles.items()}, source=source)
