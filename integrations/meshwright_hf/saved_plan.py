"""Saves a plan with a model, under "meshwright" in the model's config.json."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from meshwright.errors import PlanError
from meshwright.plan.config import ParallelPlan
from meshwright.roles.registry import CONFIG_KEY, ROLES_KEY
from meshwright.roles.sharding_plan import ShardingPlan


def save_plan(
    model_or_config: object, plan: ParallelPlan | None = None, *, sharding_plan: ShardingPlan | None = None
) -> None:
    """Put a plan into a model's config, so that ``save_pretrained`` writes it and ``from_pretrained`` reads it.

    ``to_distributed`` uses this plan if no other plan is passed; transformers ignores it. A second call replaces the
    plan, and a call without a plan removes it.

    Args:
        model_or_config: a model of transformers, or its config.
        plan: the parallel plan; besides dp and tp, only fields that differ from their defaults are written.
        sharding_plan: the roles of the modules, for an architecture that meshwright does not know.

    Raises:
        PlanError: if an argument has the wrong type.

    Example::

        meshwright_hf.save_plan(model, mw.ParallelPlan(dp=2, tp=2, sequence_parallel=True))
        model.save_pretrained("out")
    """
    config = getattr(model_or_config, "config", None) if isinstance(model_or_config, nn.Module) else model_or_config
    if not hasattr(config, "to_diff_dict"):
        raise PlanError(f"save_plan takes a model of transformers or its config, not {type(model_or_config).__name__}")
    if not isinstance(plan, ParallelPlan | None):
        raise PlanError(f"save_plan takes a meshwright.ParallelPlan, not {type(plan).__name__}")
    if not isinstance(sharding_plan, ShardingPlan | None):
        raise PlanError(
            f"save_plan(sharding_plan=...) takes a meshwright.ShardingPlan, not {type(sharding_plan).__name__}"
        )
    saved: dict[str, Any] = {}
    if plan is not None:
        values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
        # The sizes are always written, so that the plan can be read without knowing the defaults.
        defaults = {field.name: field.default for field in dataclasses.fields(plan)}
        saved = {k: v for k, v in values.items() if k in ("dp", "tp") or v != defaults[k]}
    if sharding_plan is not None:
        saved[ROLES_KEY] = {module: role.name.lower() for module, role in sharding_plan.roles.items()}
    if saved:
        setattr(config, CONFIG_KEY, saved)
    elif hasattr(config, CONFIG_KEY):
        delattr(config, CONFIG_KEY)
