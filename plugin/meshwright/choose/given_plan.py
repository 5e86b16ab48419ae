"""Finds the plan that a user gave in the config, to the launcher, or in the model's own config."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from meshwright.choose.plan_file import (
    PLAN_VARIABLE,
    REPLAN_VARIABLE,
    fields_of_text,
    launched_plan,
    mark_plan_used,
    read_plan,
)
from meshwright.errors import PlanError
from meshwright.mesh.process_group import world_size
from meshwright.mesh.rank_grid import PLAN_AXES
from meshwright.plan.config import PLAN_FIELDS, ParallelPlan, PlanLike, ToDistributedConfig
from meshwright.plan.fields import unknown_field
from meshwright.plan.foreign_names import PLAN_NAMES
from meshwright.roles.registry import CONFIG_KEY, ROLES_KEY

logger = logging.getLogger(__name__)

# Fields that only the planner has.
_AHEAD = {"replicate"}


def given_plan(config: ToDistributedConfig) -> ParallelPlan | None:
    """Return the plan that the user gave in the config or to the launcher; None if they gave none.

    Raises:
        PlanError: if the value is neither a plan nor a path of a plan file, this version cannot run the plan, or the
            config's plan differs from the launcher's.
    """
    mark_plan_used()
    fields = launched_plan()
    launched = None if fields is None else plan_of_fields(fields, PLAN_VARIABLE)
    if launched is not None and os.environ.get(REPLAN_VARIABLE) and launched.world_size != world_size():
        logger.warning(
            "launched with the plan %r for %d processes, of which %d are left, so the planner picks another plan",
            launched.label, launched.world_size, world_size(),
        )  # fmt: skip
        launched = None
    plan = config.plan
    if plan is None or plan == "auto":
        return None if launched is None else with_sequence_parallel(launched, config)
    plan = resolve_plan(plan, "ToDistributedConfig.plan")
    plan = with_sequence_parallel(plan, config)
    if launched is not None and (launched := with_sequence_parallel(launched, config)) != plan:
        raise PlanError(
            f"ToDistributedConfig.plan is {plan}, but this program was launched with {launched} ({PLAN_VARIABLE}); "
            "leave one of them out, or make them equal"
        )
    return plan


def source_of_plan(config: ToDistributedConfig, *, is_picked: bool) -> str:
    """Return in words where the plan of a call comes from."""
    if is_picked:
        return "picked by the planner, as the first that fits"
    if config.plan not in (None, "auto"):
        return "given in the call"
    return f"given to the launcher ({PLAN_VARIABLE})" if launched_plan() is not None else "in the model's config"


def config_with(config: ToDistributedConfig | None, plan: PlanLike | None) -> ToDistributedConfig:
    """Combine a call's ``config=`` and ``plan=`` into one config.

    The result is a copy, so that later assignments to the user's config change nothing.

    Raises:
        PlanError: if ``config`` is not a config, or both arguments give a plan.
    """
    if config is not None and not isinstance(config, ToDistributedConfig):
        if isinstance(config, ParallelPlan | str | os.PathLike | Mapping):
            raise PlanError(
                f"config={config!r} is a plan, and config takes the options; write plan={_shown(config)}, or "
                f"config=ToDistributedConfig(plan={_shown(config)})"
            )
        raise PlanError(f"config={config!r} must be a meshwright.ToDistributedConfig, not {type(config).__name__}")
    if isinstance(plan, ToDistributedConfig):
        raise PlanError(
            "plan= got a ToDistributedConfig, which holds options too; write config=ToDistributedConfig(...)"
        )
    if plan is None:
        return dataclasses.replace(config) if config is not None else ToDistributedConfig()
    if config is not None and config.plan is not None:
        raise PlanError(
            f"plan={_shown(plan)} and config=ToDistributedConfig(plan={_shown(config.plan)}) both give a plan; "
            "leave one of them out"
        )
    return dataclasses.replace(config or ToDistributedConfig(), plan=plan)


def resolve_plan(plan: PlanLike, source: str = "plan") -> ParallelPlan:
    """Return a plan from any of the forms that ``to_distributed(plan=...)`` accepts, except "auto".

    Args:
        plan: a ParallelPlan, its words, a dict of its fields, or the path of a plan file.
        source: the origin of the plan, for messages.

    Raises:
        PlanError: if the value has none of these forms, a field does not exist, or this version cannot run the plan.

    Example:
        >>> resolve_plan("dp2 tp2+sp zero1") == ParallelPlan(dp=2, tp=2, sequence_parallel=True, zero_stage=1)
        True
    """
    if isinstance(plan, ParallelPlan):
        return plan
    if isinstance(plan, Mapping):
        return plan_of_fields(plan, source)
    if isinstance(plan, str):
        return plan_of_fields(fields_of_text(plan, source), source if not os.path.isfile(plan) else plan)
    if isinstance(plan, os.PathLike):
        return plan_of_fields(read_plan(plan), str(plan))
    raise PlanError(
        f"{source}={plan!r} must be a meshwright.ParallelPlan, its words ('dp2 tp2+sp zero1'), a dict of its fields, "
        f"'auto' or the path of a plan file, not {type(plan).__name__}"
    )


def plan_of_fields(fields: Mapping[str, Any], source: str) -> ParallelPlan:
    """Return the plan with the fields of a file, a dict or a launcher.

    Args:
        fields: the arguments of ``ParallelPlan``.
        source: the origin of the fields, for messages.

    Raises:
        PlanError: if a field does not exist in this version, or this version cannot run the plan.
    """
    if planned := sorted(set(fields) & _AHEAD):
        raise PlanError(
            f"{source}: {', '.join(planned)} is not available in this version; plan again without --allow-future"
        )
    for name in fields:
        if name not in PLAN_FIELDS:
            raise PlanError(f"{source}: {unknown_field('a plan', name, PLAN_FIELDS, PLAN_NAMES)}")
    try:
        return ParallelPlan(**fields)
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from None


def plan_of_sizes(
    sizes: Mapping[str, Any], processes: int | None, uneven: Callable[[ParallelPlan], str]
) -> ParallelPlan:
    """Return the plan of some sizes; without dp, dp is the number of processes divided by the other sizes.

    Args:
        sizes: the arguments of ``ParallelPlan``.
        processes: the number of processes; None takes the sizes as they are.
        uneven: the message if a plan of the other sizes does not divide the processes.
    """
    if processes is None or "dp" in sizes:
        return ParallelPlan(**sizes)
    others = ParallelPlan(**{axis: sizes[axis] for axis in PLAN_AXES if axis in sizes})
    if processes % others.world_size:
        raise PlanError(uneven(others))
    return ParallelPlan(**sizes, dp=processes // others.world_size)


def _shown(plan: PlanLike) -> str:
    return f"{plan.label!r}" if isinstance(plan, ParallelPlan) else repr(plan)


def plan_in_model(model: nn.Module, config: ToDistributedConfig) -> ParallelPlan | None:
    """Return the plan under "meshwright" in the model's config.json; None if none, or if ``config.plan`` is "auto".

    Raises:
        PlanError: if this version cannot run the plan, or the plan needs another number of processes.
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
    plan = plan_of_fields(fields, source)
    if plan.world_size != world_size():
        raise PlanError(
            f"{source} plans {plan.product()} = {plan.world_size} processes, but {world_size()} were launched; pass "
            "another plan, ToDistributedConfig(plan=ParallelPlan(...)), or launch with torchrun --nproc-per-node "
            f"{plan.world_size} SCRIPT"
        )
    return with_sequence_parallel(plan, config)


def with_sequence_parallel(plan: ParallelPlan, config: ToDistributedConfig) -> ParallelPlan:
    """Return the plan with the config's ``sequence_parallel``, if that is set; tp=1 turns sequence parallelism off."""
    wanted = plan.sequence_parallel if config.sequence_parallel is None else config.sequence_parallel
    return dataclasses.replace(plan, sequence_parallel=wanted and plan.tp > 1)
