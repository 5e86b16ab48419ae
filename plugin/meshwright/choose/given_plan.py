"""The plan that a user gave, in the config, to the launcher or with the model, and its forms as YAML and JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.errors import PlanError
from meshwright.mesh.process_group import world_size
from meshwright.mesh.rank_grid import PLAN_AXES
from meshwright.outside_files import (
    OddFileError,
    parse_yaml,
    problem_of,
    read_outside,
    shown,
    table,
    text,
    that,
    write_whole,
)
from meshwright.plan.config import PLAN_FIELDS, ParallelPlan, PlanLike, ToDistributedConfig
from meshwright.plan.fields import unknown_field
from meshwright.plan.text import PLAN_NAMES, is_plan_text, parse_plan
from meshwright.printable import printable
from meshwright.roles.registry import CONFIG_KEY, ROLES_KEY
from meshwright_plan.job.candidate import Candidate

PLAN_VERSION = 1
PLAN_VARIABLE = (
    "MESHWRIGHT_PLAN"  # environment variable with the launcher's plan: words, a line of JSON or the path of a file
)
# If set, the launcher's plan only holds for the number of processes that it needs; for another number one is picked.
REPLAN_VARIABLE = "MESHWRIGHT_REPLAN"
# The path of a file that exists once a program has asked for the launcher's plan; meshwright launch looks for it.
USED_VARIABLE = "MESHWRIGHT_PLAN_USED"

_LARGEST = 2**16  # bytes of a plan, with comments
# What is read is echoed by the errors of each field.
_SHORT = table(
    that("a value of at most 1000 characters", lambda value: len(json.dumps(value, default=str)) <= 1000),
    names=text(most=100),
)
_FORM = """a plan has one field per line, as in 'dp: 2', or is a dict in one line, as in '{"dp": 2, "tp": 2}'"""


def save_plan(plan: Candidate, path: str | Path, *, comment: str = "", dtype: str | None = None) -> None:
    """Write a plan to a YAML file.

    Args:
        plan: the plan.
        path: the file to write.
        comment: lines to put at the head of the file as comments.
        dtype: the dtype of the weights for which the plan was estimated; None to leave it out.

    Raises:
        PlanError: if the file cannot be written.
    """
    lines = [f"# {printable(line)}".rstrip() for line in comment.splitlines()]
    lines.append(f"version: {PLAN_VERSION}")
    shown = (*PLAN_AXES, "sequence_parallel", "zero_stage", "micro_batch_size", "recompute")
    fields = {name: getattr(plan, name) for name in shown} | plan.changed
    fields.pop("gradient_accumulation_steps", None)  # the number of micro-batches follows from the batch
    lines += [f"{key}: {json.dumps(value)}" for key, value in fields.items()]
    if dtype is not None:
        lines.append(f"dtype: {json.dumps(dtype)}")
    write_whole(path, "\n".join(lines) + "\n", option="--save")


def read_plan(path: str | os.PathLike[str]) -> dict[str, object]:
    """Check the version of a plan file and return its other fields.

    Raises:
        PlanError: if the file does not exist, is not a YAML mapping, or has another version.
    """
    try:
        content = read_outside(path, most=_LARGEST)
    except FileNotFoundError:
        raise PlanError(
            f"{path}: no such plan; write one with meshwright plan --save, or give the plan in words: "
            "plan='dp2 tp2+sp zero1'"
        ) from None
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{path} cannot be read as a plan file ({error}); write one with meshwright plan --save"
        ) from None
    return _fields_in(content, str(path))


def fields_of_text(text: str, source: str) -> dict[str, object]:
    """Return the fields of a plan from a string: its words, a dict in JSON or YAML, or the path of a plan file.

    Args:
        text: the string.
        source: the origin of the string, for messages.

    Raises:
        PlanError: if the string is none of these.

    Example:
        >>> fields_of_text("dp2 zero1", "plan"), fields_of_text('{"tp":2}', "plan")
        ({'dp': 2, 'zero_stage': 1}, {'tp': 2})
    """
    if text.lstrip().startswith("{"):
        return _fields_in(text, source)
    if text.strip().lower() == "auto":
        raise PlanError(f"{source} {text!r}: to have a plan picked, write plan='auto', or leave --plan out")
    if not text.strip() or is_plan_text(text):
        return parse_plan(text, source)
    return read_plan(text)


def plan_line(fields: Mapping[str, object]) -> str:
    """Return a plan as one line of JSON, which reaches every process on every machine without a shared file.

    Args:
        fields: the fields of ``ParallelPlan``.

    Example:
        >>> plan_line({"dp": 2, "tp": 2})
        '{"version": 1, "dp": 2, "tp": 2}'
    """
    return json.dumps({"version": PLAN_VERSION, **fields})


def launched_plan() -> dict[str, object] | None:
    """Return the fields of the plan in the environment (``MESHWRIGHT_PLAN``); None without one.

    Raises:
        PlanError: if the variable is neither a plan in words, a line of JSON nor the path of a plan file, or the plan
            has another version.
    """
    text = os.environ.get(PLAN_VARIABLE, "").strip()
    return fields_of_text(text, PLAN_VARIABLE) if text else None


def mark_plan_used() -> None:
    """Tell ``meshwright launch``, if it started this program, that the program trains under a plan."""
    path = os.environ.get(USED_VARIABLE)
    if path:
        with contextlib.suppress(OSError):  # the launcher is gone, or on another machine
            Path(path).touch()


def _fields_in(content: str | bytearray, source: str) -> dict[str, object]:
    """Return the fields of a YAML or JSON mapping, without its version."""
    try:
        fields = parse_yaml(content)
    except OddFileError as error:
        raise PlanError(f"{source}: {error}; {_FORM}") from None
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise PlanError(f"{source}: {shown(fields)} is not 'key: value'; {_FORM}")
    version = fields.pop("version", PLAN_VERSION)  # optional in a file written by hand
    if version != PLAN_VERSION:
        raise PlanError(
            f"{source}: the plan has version {shown(version)}, but this version of meshwright reads version "
            f"{PLAN_VERSION}; write it again with meshwright plan --save"
        )
    if (wrong := problem_of(fields, _SHORT)) is not None:
        raise PlanError(f"{source}: {wrong}; {_FORM}")
    return fields


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
    if isinstance(plan, Candidate):  # of a search, which checks nothing
        return plan.plan
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
