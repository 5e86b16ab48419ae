"""Describe the sizes of a model to the planner: by its transformers config, or by its modules."""

from __future__ import annotations

from torch import nn

from meshwright.errors import PlanError
from meshwright.mesh.process_group import world_size
from meshwright.model_kinds import kind_of
from meshwright.parallel.model_shape import shape_of
from meshwright.parallel.routed_shape import on_meta, routed_shape
from meshwright.parallel.structure import describe as describe_structure
from meshwright.plan.config import ToDistributedConfig
from meshwright.planner.shapes import ModelShape, describe
from meshwright.roles import ShardingPlan, plan_for
from meshwright.roles.adapters import without_wrappers
from meshwright.roles.blocks.experts import has_experts


def describe_model(model: nn.Module, config: ToDistributedConfig) -> ModelShape:
    """Describe the model by its transformers config or, without one or with experts, by its structure.

    Raises:
        PlanError: the planner does not know the model's sizes.
    """
    name = type(model).__name__
    if hasattr(getattr(model, "config", None), "to_dict"):
        decoder = without_wrappers(model)[1]
        if has_experts(decoder) and kind_of(model.config) is None:
            return routed_shape(on_meta(decoder), name=name)
        return describe(model.config, name=name)
    try:
        return shape_of(model, config.sharding_plan or plan_for(model))
    except PlanError as error:
        raise PlanError(
            f"picking a plan needs a transformers config or a decoder's structure, and {name} has neither; pass a "
            f"plan: plan='dp{world_size()}' ({error})"
        ) from error


def against_tensor(model: nn.Module, sharding_plan: ShardingPlan | None = None) -> str | None:
    """Return why no plan with tp may be picked for a model with experts; None if one may, or if the model is dense.

    Dense models are asked for each size of tp, which costs more.
    """
    decoder = without_wrappers(model)[1]
    if not has_experts(decoder):
        return None
    try:
        found = describe_structure(decoder, sharding_plan or plan_for(decoder), tp=1, sequence_parallel=False)
    except PlanError as error:
        return str(error).splitlines()[0]
    return next((f"{name} stays whole under tp, which the planner does not estimate" for name in found.whole), None)
