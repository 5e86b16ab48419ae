"""A plan as a small YAML file that people can read and change, and as the line that launchers hand to programs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate

PLAN_VERSION = 1
PLAN_VARIABLE = "MESHWRIGHT_PLAN"  # of the environment: a launcher's plan, as a line of JSON or the path of a file


def plan_fields(plan: Candidate) -> dict[str, Any]:
    """Return the keyword arguments that make the runtime's ``ParallelPlan`` of a candidate.

    What the runtime has no word for yet is named too, so that a plan made ahead is refused, not run as another.

    Example:
        >>> plan_fields(Candidate(shard=4, tp=2, sequence_parallel=True, zero_stage=1, accumulation=2))["dp"]
        4
    """
    fields: dict[str, Any] = {
        "dp": plan.dp,
        "tp": plan.tp,
        "cp": plan.cp,
        "pp": plan.pp,
        "sequence_parallel": plan.sequence_parallel,
        "zero_stage": plan.zero_stage,
        "micro_batch_size": plan.micro_batch,
        "recompute": plan.recompute,
    }
    if plan.cp > 1:
        fields["context"] = "ring" if plan.ring else "ulysses"
    if plan.interleave > 1:
        fields["interleave"] = plan.interleave
    if plan.replicate > 1 and plan.zero_stage:
        fields["replicate"] = plan.replicate
    if plan.recomputed is not None:
        fields["recomputed_layers"] = plan.recomputed
    return fields


def runnable_fields(plan: Candidate) -> dict[str, Any]:
    """Return the arguments of ``ParallelPlan`` for a candidate that this version runs.

    Example:
        >>> runnable_fields(Candidate(replicate=2, micro_batch=4))["micro_batch_size"] is None
        True
    """
    assert plan.runs_today
    return {**plan_fields(plan), "micro_batch_size": plan.micro_batch if plan.accumulation > 1 else None}


def save_plan(plan: Candidate, path: str | Path, *, comment: str = "") -> None:
    """Write a plan.

    Args:
        plan: the plan.
        path: the file to write.
        comment: lines that say where it comes from.

    Raises:
        PlanError: a directory that is not there, or a file that cannot be written.
    """
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines.append(f"version: {PLAN_VERSION}")
    lines += [f"{key}: {json.dumps(value)}" for key, value in plan_fields(plan).items()]
    try:
        Path(path).write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise PlanError(f"--save {path}: {error.strerror}; name another file") from None


def read_plan(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of a plan file, its version checked and left out.

    Raises:
        PlanError: no such file, a line that is not ``key: value``, or another version.
    """
    try:
        content = Path(path).read_text()
    except FileNotFoundError:
        raise PlanError(f"{path}: no such plan; write one with meshwright plan --save") from None
    fields: dict[str, Any] = {}
    for number, line in enumerate(content.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        key, colon, value = line.partition(":")
        try:
            fields[key.strip()] = json.loads(value) if value.strip()[:1] in '0123456789"tf[n-' else value.strip()
        except json.JSONDecodeError:
            colon = ""
        if not colon:
            raise PlanError(f"{path}: line {number}: {line!r} is not 'key: value'")
    return _without_version(fields, str(path))


def plan_line(fields: Mapping[str, Any]) -> str:
    """Return a plan as one line of JSON, which reaches every process of every machine without a shared file.

    Args:
        fields: those of ``ParallelPlan``.

    Example:
        >>> plan_line({"dp": 2, "tp": 2})
        '{"version": 1, "dp": 2, "tp": 2}'
    """
    return json.dumps({"version": PLAN_VERSION, **fields})


def launched_plan() -> dict[str, Any] | None:
    """Return the fields of the plan in the environment (``MESHWRIGHT_PLAN``); None where there is none.

    Raises:
        PlanError: neither a plan as a line of JSON nor the path of a plan file, or of another version.
    """
    text = os.environ.get(PLAN_VARIABLE, "").strip()
    if not text:
        return None
    if not text.startswith("{"):
        return read_plan(text)
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"{PLAN_VARIABLE}={text!r} is not JSON ({error}); meshwright launch sets it") from None
    return _without_version(fields, PLAN_VARIABLE)


def _without_version(fields: dict[str, Any], source: str) -> dict[str, Any]:
    if (version := fields.pop("version", None)) != PLAN_VERSION:
        raise PlanError(f"{source}: a plan of version {version}, and this is version {PLAN_VERSION}; plan again")
    return fields
