"""Reads and writes a plan: a YAML file that people can edit, or a line of JSON that launchers pass to programs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from meshwright.errors import PlanError
from meshwright.outside_files import OddFileError, parse_yaml, read_outside
from meshwright.plan.text import is_plan_text, parse_plan
from meshwright.planner.job.candidate import Candidate
from meshwright.printable import printable
from meshwright.schema import problem_of, shown, table, text, that
from meshwright.whole_file import write_whole

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
    lines += [f"{key}: {json.dumps(value)}" for key, value in plan.fields().items()]
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
