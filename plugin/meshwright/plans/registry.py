"""Which plan a model gets: the user's, its family's, or one inferred from its structure."""

from __future__ import annotations

from torch import nn

from meshwright.errors import PlanError
from meshwright.plans import gemma2, llama, mistral, olmo2, phi3, qwen2, qwen3
from meshwright.plans.base import ShardingPlan
from meshwright.plans.families import hints_for, reason_to_refuse
from meshwright.plans.infer import infer_plan

_PLANS: dict[str, ShardingPlan] = {
    "gemma2": gemma2.PLAN,
    "llama": llama.PLAN,
    "mistral": mistral.PLAN,
    "olmo2": olmo2.PLAN,
    "phi3": phi3.PLAN,
    "qwen2": qwen2.PLAN,
    "qwen3": qwen3.PLAN,
}


def register_plan(model_type: str, plan: ShardingPlan) -> None:
    """Use ``plan`` for models whose ``config.model_type`` is ``model_type``; the last call wins.

    Raises:
        ValueError: if ``plan`` is not a ShardingPlan.

    Example:
        >>> from meshwright.plans.base import ShardingPlan, decoder_roles
        >>> register_plan("my_llama", ShardingPlan(roles=decoder_roles(base="decoder")))
    """
    if not isinstance(plan, ShardingPlan):
        raise ValueError(f"register_plan({model_type!r}) takes a meshwright.ShardingPlan, not {type(plan).__name__}")
    _PLANS[model_type] = plan


def plan_for(model: nn.Module) -> ShardingPlan:
    """The registered plan of the model's family, else one inferred from its structure and its family's hints.

    Raises:
        PlanError: for a family that cannot be sharded over tp, or where no plan can be inferred.
    """
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", "")
    if model_type in _PLANS:
        return _PLANS[model_type]
    if reason := reason_to_refuse(config):
        raise PlanError(f"{model_type} cannot be sharded over tp: {reason}. Use ParallelPlan(tp=1)")
    return infer_plan(model, hints_for(config))
