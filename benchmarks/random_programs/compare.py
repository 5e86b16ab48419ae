"""Judges a random program under its plan: equal to one process, refused, warned about, or silently different."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from benchmarks.random_programs.draw import Program
from benchmarks.random_programs.run import Numbers, run
from harness import WorkerError, WorkerHang
from support.exact import relative_difference

# In float64, reordered sums differ by 1e-16 each. Four steps of AdamW with small moments make this 1e-11 at worst.
TOLERANCE = 1e-9

Verdict = Literal["equal", "refused", "warned", "crashed", "SILENT", "illegal"]


@dataclass(frozen=True)
class Outcome:
    """The verdict on a program, and the reason: a difference, or a line of the error."""

    program: Program
    verdict: Verdict
    why: str


def judge(program: Program, pool: Any) -> Outcome:
    """Run a program on one process and under its plan, and compare.

    Args:
        pool: a worker pool with as many ranks as the plan.
    """
    try:
        expected = run(program, distributed=False)
    except Exception as error:  # a program that raises on one device is not legal
        return Outcome(program, "illegal", f"{type(error).__name__}: {error}".splitlines()[0])
    try:
        ranks = pool.run(run, program, distributed=True, timeout=180)
    except WorkerHang as hang:
        return Outcome(program, "crashed", f"hang: {str(hang).splitlines()[0]}")
    except WorkerError as failure:
        return _of_error(program, str(failure))
    difference, what = largest_difference(ranks, expected)
    if difference <= TOLERANCE:
        return Outcome(program, "equal", f"{difference:.0e}")
    warnings = [text for rank in ranks for text in rank.warnings if "different weights" not in text]
    if warnings:
        return Outcome(program, "warned", f"{what} off by {difference:.0e}; {warnings[0]}")
    return Outcome(program, "SILENT", f"{what} off by {difference:.0e}")


def largest_difference(ranks: list[Numbers], expected: Numbers) -> tuple[float, str]:
    """Return the largest relative difference of any rank's numbers, and the name of that number."""
    found = [(0.0, "nothing")]
    for number, rank in enumerate(ranks):
        for name in ("losses", "norms", "said"):
            pairs = _pairs(getattr(rank, name), getattr(expected, name))
            found += [(_relative(ours, theirs), f"{name} of rank {number}") for ours, theirs in pairs]
    for name in ("weights", "average"):
        ours, theirs = getattr(ranks[0], name), getattr(expected, name)
        if ours.keys() != theirs.keys():
            found.append((math.inf, f"the names of {name}: {sorted(ours.keys() ^ theirs.keys())[:2]}"))
        found += [(_of_tensors(ours[key], theirs[key]), f"{name} {key}") for key in ours.keys() & theirs.keys()]
    return max(found)


def _of_tensors(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return math.inf
    difference = relative_difference(actual, expected)
    return math.inf if math.isnan(difference) else difference


def _pairs(ours: list[Any], theirs: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(ours, theirs, strict=True)) if len(ours) == len(theirs) else [(ours, theirs)]


def _relative(actual: Any, expected: Any) -> float:
    if not isinstance(actual, int | float) or not isinstance(expected, int | float):
        return 0.0 if actual == expected else math.inf
    difference = abs(actual - expected) / max(abs(expected), 1e-12)
    return 0.0 if actual == expected else math.inf if math.isnan(difference) else difference


def _of_error(program: Program, text: str) -> Outcome:
    lines = [line for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if line and not line.startswith((" ", "-")) and "Error" in line.split(":")[0]]
    why = raised[0] if raised else lines[-1]
    is_ours = "meshwright" in "".join(raised).lower() or any(word in why for word in _CURES)
    return Outcome(program, "refused" if is_ours else "crashed", why[:300])


_CURES = ("to_distributed", "ToDistributedConfig", "ParallelPlan", "no_sync", "full_state_dict", "clip_grad_norm_")
