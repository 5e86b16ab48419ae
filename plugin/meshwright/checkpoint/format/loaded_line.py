"""Tells the user what a run was resumed from."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import PlanError
from meshwright.plan.config import ParallelPlan
from meshwright.printable import printable
from meshwright.progress import is_first_rank


def show_loaded(folder: str | os.PathLike[str], *, step: int | None, plan: Mapping[str, object] | None) -> None:
    """Print one line on rank 0 with a checkpoint that has been loaded.

    Args:
        folder: the checkpoint's folder.
        step: the step after which it was saved; None if it does not say.
        plan: the fields of the plan under which it was saved; None if it does not say.
    """
    if is_first_rank():
        print(printable(loaded_line(folder, step=step, plan=plan)), file=sys.stderr, flush=True)


def loaded_line(folder: str | os.PathLike[str], *, step: int | None, plan: Mapping[str, object] | None) -> str:
    """Return the line of ``show_loaded``.

    Example:
        >>> loaded_line("runs/step-20", step=20, plan={"dp": 2, "zero_stage": 1})
        'meshwright: loaded runs/step-20, step 20, saved under dp2 zero1'
    """
    path, here = Path(folder), Path.cwd()
    path = path.relative_to(here) if path.is_relative_to(here) else path
    label = None if plan is None else _label(plan)
    parts = [f"meshwright: loaded {path}", step is not None and f"step {step}", label and f"saved under {label}"]
    return ", ".join(part for part in parts if part)


def _label(plan: Mapping[str, Any]) -> str | None:
    """Return the words of a plan; None for fields of another version, which do not keep a checkpoint from loading."""
    try:
        return ParallelPlan(**plan).label
    except (PlanError, TypeError):
        return None
