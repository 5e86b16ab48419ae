"""The plan that a user gave: in the config, to the launcher, or in the model's own config."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from meshwright.config import ParallelPlan, ToDistributedConfig
from meshwright.errors import PlanError
from meshwright.launch import world_size
from meshwright.planner.plan_file import PLAN_VARIABLE, launched_plan, read_plan
from meshwright.plans.registry import CONFIG_KEY, ROLES_KEY


def given_plan(config: ToDistributedConfig) -> ParallelPlan | None:
    """Return the plan that the user gave, in the config or to the launcher; None where the planner shall pick.

    Raises:
        PlanError: neither a plan nor the path of one, one that this version cannot run, or a plan in the config
            that is not the launcher's.
    """
    fields = launched_plan()
    launched = None if fields is None else plan_of_fields(fields, PLAN_VARIABLE)
    plan = config.plan
    if plan is None or plan == "auto":
        return None if launched is None else with_sequence_parallel(launched, config)
    if isinstance(plan, str | os.PathLike):
        plan = plan_of_fields(read_plan(plan), str(plan))
    if not isinstance(plan, ParallelPlan):
        raise PlanError(
            f"ToDistributedConfig.plan must be a meshwright.ParallelPlan, 'auto', or the path of a plan file, not "
            f"{type(plan).__name__}"
        )
    plan = with_sequence_parallel(plan, config)
    if launched is not None and (launched := with_sequence_parallel(launched, config)) != plan:
        raise PlanError(
            f"ToDistributedConfig.plan is {plan}, but this program was launched with {launched} ({PLAN_VARIABLE}); "
            "leave one of them out, or make them equal"
        )
    return plan


def plan_of_fields(fields: Mapping[str, Any], source: str) -> ParallelPlan:
    """Return the plan of a file's or a launcher's fields.

    Args:
        fields: the arguments of ``ParallelPlan``.
        source: where they come from, for messages.

    Raises:
        PlanError: what this version has no word for, or cannot run.
    """
    known = {field.name for field in dataclasses.fields(ParallelPlan)}
    if unknown := sorted(set(fields) - known):
        raise PlanError(f"{source}: {', '.join(unknown)} is not available in this version; plan again")
    return ParallelPlan(**fields)


def plan_in_model(model: nn.Module, config: ToDistributedConfig) -> ParallelPlan | None:
    """Return the plan that came with the model, under "meshwright" in its config.json; None without one.

    Raises:
        PlanError: one that this version cannot run, or for another number of processes; it says where it is.
    """
    saved = getattr(getattr(model, "config", None), CONFIG_KEY, None)
    if saved is None or config.plan == "auto":
        return None
    source = f'"{CONFIG_KEY}" in the config of {getattr(model.config, "name_or_path", "") or type(model).__name__}'
    if not isinstance(saved, Mapping):
        raise PlanError(f"{source} must be an object with the fields of a ParallelPlan, not {saved!r}")
    fields = {name: value for name, value in saved.items() if name != ROLES_KEY}
    if not fields:
        return None
    known = [field.name for field in dataclasses.fields(ParallelPlan)]
    if unknown := sorted(set(fields) - set(known)):
        raise PlanError(f"{source} has {', '.join(unknown)}; the fields of a plan are {', '.join(known)}")
    try:
        plan = ParallelPlan(**fields)
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from error
    if plan.world_size != world_size():
        raise PlanError(
            f"{source} plans dp={plan.dp} x tp={plan.tp} x cp={plan.cp} x pp={plan.pp} = {plan.world_size} processes, "
            f"but {world_size()} were launched; pass another: ToDistributedConfig(plan=ParallelPlan(...)), or launch "
            f"with: torchrun --nproc-per-node {plan.world_size} SCRIPT"
        )
    return with_sequence_parallel(plan, config)


def with_sequence_parallel(plan: ParallelPlan, config: ToDistributedConfig) -> ParallelPlan:
    """Return the plan with what the config says of sequence parallelism, which one rank has none of."""
    wanted = plan.sequence_parallel if config.sequence_parallel is None else config.sequence_parallel
    return dataclasses.replace(plan, sequence_parallel=wanted and plan.tp > 1)
