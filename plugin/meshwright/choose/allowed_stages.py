"""Decides whether a plan with pipeline stages may be picked for a model."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.parallel.losses.head_losses import find_loss
from meshwright.parallel.tensor_parallel.structure import outline
from meshwright.pipeline.layer_order import record_order
from meshwright.plan.config import ToDistributedConfig
from meshwright.roles.adapters import without_wrappers


def against_stages(model: nn.Module, config: ToDistributedConfig) -> str | None:
    """Return why no plan with pipeline stages may be picked for a model, as far as this shows without a forward pass.

    Args:
        model: the model.
        config: the options of ``to_distributed``.

    Returns:
        The reason; None if such a plan may be picked.
    """
    if not config.picks_stages:
        return "ToDistributedConfig(picks_stages=False)"
    if config.engine is not None:
        return f"{config.engine} runs the backward pass of the whole model"
    if find_loss(without_wrappers(model)[1], config.loss_averages_over) is None:
        return "the model computes its own loss, and a pipeline's backward pass runs inside the model's forward"
    if next(model.parameters()).dtype is torch.float16:
        return "stages were compared with one device in float16 under autocast only, not with float16 weights"
    return None


def why_not_cut(model: nn.Module, config: ToDistributedConfig) -> str | None:
    """Return why the layers of a model cannot be cut into stages; None if they can.

    The model's forward runs once on tensors without values.
    """
    decoder = without_wrappers(model)[1]
    try:
        order = record_order(decoder, outline(decoder, config.sharding_plan, instead="ParallelPlan(pp=1)").layers)
    except PlanError as error:
        return str(error)
    if not order.is_plain:
        return "what crosses its stages beside hidden states of [rows, tokens, channels] has no estimate"
    return None
