"""Adds an optimizer to a model that was distributed without one, and extends the model's plan."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from torch.optim import Optimizer

from meshwright.choose.given_plan import given_plan
from meshwright.errors import AlreadyDistributedError, PlanError
from meshwright.facts import Facts
from meshwright.features.splits import split_batches
from meshwright.optim.attach_gradients import install_gradient_sync
from meshwright.optim.elementwise import declared, whole_groups
from meshwright.optim.runtime import Runtime
from meshwright.optim.state_dicts import check_ownership
from meshwright.parallel.forward.recompute import recompute_layers
from meshwright.parallel.forward.user_hooks import HookedModules
from meshwright.parallel.shards.added_parameters import check_none_added
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.roles.adapters import without_wrappers

# Options that only the call that distributes the model can set.
_SETTLED = (
    "weights",
    "sharding_plan",
    "gather_logits",
    "num_items_in_batch",
    "loss_averages_over",
    "batch_dims",
    "check_replicas_every",
    "compile",
    "compile_options",
    "timeout_s",
)


def plan_to_complete(
    runtime: Runtime, model: nn.Module, optimizer: Optimizer | None, config: ToDistributedConfig
) -> ParallelPlan:
    """Check that an optimizer and a plan fit a distributed model, without changing them.

    Args:
        runtime: the model's runtime.
        model: the model, distributed without an optimizer.
        optimizer: the optimizer over the model's parameters, which are shards.
        config: the options. Their plan may be None, or may add to the plan with which the model was distributed.

    Returns:
        The model's plan with these additions.

    Raises:
        AlreadyDistributedError: if the model has an optimizer.
        PlanError: if the plan or an option contradicts how the model was distributed.
        OptimizerMismatchError: if the optimizer belongs to another model, or its step on a shard may differ from
            its step on the whole tensor.
    """
    if optimizer is not None and runtime.gradients.has_optimizer:
        raise AlreadyDistributedError(
            "this model was distributed by an earlier call, with an optimizer; leave this call out, or build a new "
            "model to use another optimizer"
        )
    before = runtime.plan
    if before is None:
        raise AlreadyDistributedError("this model's optimizer is already sharded; build a new model for to_distributed")
    late = [name for name in _SETTLED if getattr(config, name) != getattr(ToDistributedConfig(), name)]
    if late:
        raise PlanError(
            f"ToDistributedConfig.{late[0]} cannot change a model that is already distributed; pass it in the call "
            "that distributes the model"
        )
    given = None if config.plan is None else given_plan(config)
    plan = before if given is None else given
    for field in dataclasses.fields(ParallelPlan):
        old, new = getattr(before, field.name), getattr(plan, field.name)
        if field.compare and old != new and not _may_follow(field, before, new, has_optimizer=optimizer is not None):
            raise PlanError(
                f"ParallelPlan.{field.name}={new!r}, but the model was distributed with {field.name}={old!r}; leave "
                "ToDistributedConfig.plan=None to keep the model's plan, or build a new model"
            )
    if config.sequence_parallel not in (None, before.sequence_parallel):
        raise PlanError(
            f"ToDistributedConfig.sequence_parallel={config.sequence_parallel}, but the model was distributed with "
            f"sequence_parallel={before.sequence_parallel}; leave it None, or build a new model"
        )
    if optimizer is not None:
        check_ownership(model, optimizer)
        check_none_added(model.named_parameters())
        changed = [] if runtime.weights is None else runtime.weights.changed()
        if changed:
            raise PlanError(
                f"requires_grad of {changed[0]} and {len(changed) - 1} more parameter(s) was changed after the model "
                "was distributed, but ZeRO stage 3 stores trained and frozen ones apart; freeze them first, or use "
                "zero_stage=2"
            )
        if plan.zero_stage > 0 and any(p.grad is not None for p in model.parameters()):
            raise PlanError(
                f"ParallelPlan.zero_stage={plan.zero_stage} shards gradients, but the model already has some; call "
                "model.zero_grad() before to_distributed"
            )
    return plan


def complete(
    runtime: Runtime, model: nn.Module, optimizer: Optimizer | None, plan: ParallelPlan, config: ToDistributedConfig
) -> None:
    """Bind the optimizer to a distributed model's gradients, and install the plan's additions, without communication.

    Args:
        runtime: the model's runtime, which is updated.
        model: the distributed model.
        optimizer: the optimizer, checked by ``plan_to_complete``.
        plan: the plan that ``plan_to_complete`` returned.
        config: the options of the call.
    """
    before, runtime.plan = runtime.plan, plan
    assert before is not None
    if optimizer is not None:
        with reading_shards():
            install_gradient_sync(
                runtime,
                list(model.parameters()),
                optimizer,
                zero_stage=plan.zero_stage,
                bucket_bytes=int(config.bucket_size_mb * 2**20),
                whole_groups=whole_groups(optimizer, reads=declared(config), plan=plan),
            )
    decoder: nn.Module = without_wrappers(model)[1]
    if plan.has_micro_batches and not before.has_micro_batches:
        runtime.features.get(HookedModules).is_split = True
        if plan.pp == 1:  # a pipeline splits batches itself
            split_batches(Facts(decoder), runtime, plan)
    if plan.recompute == "full" and before.recompute == "none":
        recompute_layers(decoder, plan.recomputed_layers)


def _may_follow(field: dataclasses.Field[Any], before: ParallelPlan, new: object, *, has_optimizer: bool) -> bool:
    """Return whether a field of the plan may still change after the model was distributed by the plan ``before``."""
    old = getattr(before, field.name)
    if field.name == "offload":
        return has_optimizer and before.zero_stage < 3  # stage 3 keeps the parameters in the dtype of the masters
    if field.name == "zero_stage":
        return has_optimizer and max(old, new) < 3  # stage 3 shards the parameters, which exist already
    if field.name in ("micro_batch_size", "gradient_accumulation_steps"):
        return old == field.default or before.pp > 1  # a pipeline splits each batch anew
    if field.name == "recomputed_layers":
        return before.recompute == "none" and before.pp == 1
    return field.name == "recompute" and old == field.default
