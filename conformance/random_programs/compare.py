"""Judges a random program under its plan: equal to one process, refused with a cure, warned about, or at fault."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

import meshwright.errors
from conformance.random_programs.draw import Program
from conformance.random_programs.plants import run_with
from conformance.random_programs.run import STEPS, TIMEOUT, Numbers
from conformance.random_programs.trait import Verdict
from harness import WorkerError, WorkerHang
from harness.messages import Failure
from support.exact import relative_difference

# In float64, reordered sums differ by 1e-16 each. Two steps of AdamW with small moments make this 1e-11 at worst.
TOLERANCE = 1e-9
FAULTS: tuple[Verdict, ...] = ("SILENT", "raw", "hang", "false alarm", "nothing compared", "illegal")
# A program is legal and the same on all ranks, so only these errors can be about the program.
_CURABLE = {name for name, x in vars(meshwright.errors).items() if isinstance(x, type) and issubclass(x, Exception)}
_FOLLOWS = "PeerFailedError"  # what a rank raises because another one has failed
_SWALLOWED = re.compile(r"meshwright: rank \d[^\n]* the program caught \w+ and went on.*", re.DOTALL)
# A cure tells the user to do something, and has it as code.
_VERBS = (
    "add|build|call|change|choose|compute|create|divide|drop|freeze|give|leave|load|make|move|name|pass|put|read|register"
    "|remove|replace|run|save|set|train|use|wrap|write"
)
_CURE = re.compile(rf"\b(?:{_VERBS})\b.*(?:\w\(|\w ?=|\bmw\.|'[^']+'|\"[^\"]+\")", re.IGNORECASE | re.DOTALL)
_RAISED = re.compile(r'File "[^"]*/meshwright(?:_hf)?/[^"]*", line \d+, in [^\n]+\n\s+raise ')


@dataclass(frozen=True)
class Outcome:
    """The verdict on a program, and the reason: a difference, or a line of the error."""

    program: Program
    verdict: Verdict
    why: str
    details: str = ""

    @property
    def is_fault(self) -> bool:
        return self.verdict in FAULTS


def judge(program: Program, pools: Mapping[int, Any], *, plant: str | None = None) -> Outcome:
    """Run a program on one process and under its plan, and compare.

    Args:
        program: the program to judge.
        pools: worker pools by their number of ranks: of one, and as many as the plan has.
        plant: the name of a fault to plant in the run under the plan; see ``plants.py``.
    """
    try:
        [expected] = pools[1].run(run_with, program, distributed=False, plant=plant, timeout=3 * TIMEOUT)
    except (WorkerError, WorkerHang) as error:  # a program that raises on one device is not legal
        return Outcome(program, "illegal", _last_line(str(error)), str(error))
    try:
        answers = pools[program.world_size].answers(
            run_with, program, distributed=True, plant=plant, timeout=3 * TIMEOUT
        )
    except WorkerHang as hang:
        return of_hang(program, str(hang))
    failures = [answer for _, answer in sorted(answers.items()) if isinstance(answer, Failure)]
    if failures:
        return of_failures(program, failures, program.world_size)
    return of_numbers(program, [answers[rank].value for rank in range(program.world_size)], expected)


def of_numbers(program: Program, ranks: list[Numbers], expected: Numbers) -> Outcome:
    """Return the verdict on a program that ended, given the numbers of each rank and of one process."""
    if missing := _missing(program, ranks, expected):
        return Outcome(program, "nothing compared", missing)
    is_local = any(trait.is_local for trait in program.traits)
    difference, what = largest_difference(ranks, expected, has_losses=not is_local)
    if difference <= TOLERANCE:
        return Outcome(program, "equal", f"{difference:.0e}")
    warnings = [text for rank in ranks for text in rank.warnings]
    told = [text for text in warnings for trait in program.traits if trait.warns and re.search(trait.warns, text)]
    said = f"{what} off by {difference:.0e}" + "".join(f"; {text}"[:300] for text in (told or warnings)[:1])
    is_known = any(trait.by_design and re.search(trait.by_design, program.words) for trait in program.traits)
    return Outcome(program, "warned" if told else "by design" if is_known else "SILENT", said)


def of_failures(program: Program, failures: list[Failure], world_size: int) -> Outcome:
    """Return the verdict on a program that raised on some ranks: refused, if all say what to change."""
    details = "\n".join(failure.traceback for failure in failures)
    failures = [_said_at_the_end(failure) for failure in failures]
    causes = sorted((f for f in failures if f.type_name != _FOLLOWS), key=lambda f: f.time)
    cause = (causes or failures)[0]
    line = f"{cause.type_name}: {' '.join(cause.message.split())}"[:300]
    if unclear := [failure for failure in causes if not _is_ours(failure)]:
        first = unclear[0]
        return Outcome(program, "raw", f"{first.type_name}: {' '.join(first.message.split())}"[:300], details)
    if not causes:
        return Outcome(program, "raw", line, details)
    if len(failures) < world_size:
        return Outcome(program, "raw", f"only {len(failures)} of {world_size} ranks raise {line}", details)
    if not _CURE.search(cause.message):
        return Outcome(program, "raw", f"no cure: {line}", details)
    refusing = [trait for trait in program.traits if "refused" in trait.may]
    if refusing and not any(re.search(trait.tells, cause.message) for trait in refusing):
        return Outcome(program, "raw", f"says nothing of {' or '.join(x.name for x in refusing)}: {line}", details)
    return Outcome(program, "refused" if refusing else "false alarm", line, details)


def of_hang(program: Program, text: str) -> Outcome:
    """Return the verdict on a program some of whose ranks do not end: a hang, or an error that only some raise."""
    raised = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", text.partition("---- rank")[2], re.MULTILINE)
    if "after another rank failed" in text and raised:
        return Outcome(program, "raw", f"only some ranks raise {raised[0]}"[:300], text)
    return Outcome(program, "hang", text.splitlines()[0], text)


def largest_difference(ranks: list[Numbers], expected: Numbers, *, has_losses: bool = True) -> tuple[float, str]:
    """Return the largest relative difference of any rank's numbers, and the name of that number."""
    found = [(0.0, "nothing")]
    for number, rank in enumerate(ranks):
        for name in ("losses", "norms", "said") if has_losses else ("norms", "said"):
            pairs = _pairs(getattr(rank, name), getattr(expected, name))
            found += [(_relative(ours, theirs), f"{name} of rank {number}") for ours, theirs in pairs]
    for name in ("weights", "average"):
        ours, theirs = getattr(ranks[0], name), getattr(expected, name)
        if names := ours.keys() ^ _known(theirs, ours):
            found.append((math.inf, f"the names of {name}: {sorted(names)[:2]}"))
        found += [(_of_tensors(ours[key], theirs[key]), f"{name} {key}") for key in ours.keys() & theirs.keys()]
    return max(found)


def _missing(program: Program, ranks: list[Numbers], expected: Numbers) -> str:
    """Return what a comparison would lack, so that nothing is never found equal to nothing."""
    if len(ranks) != program.world_size:
        return f"{len(ranks)} of {program.world_size} ranks have numbers"
    if len(expected.losses) < STEPS or not all(math.isfinite(loss) for loss in expected.losses):
        return f"one process has the losses {expected.losses}"
    if not expected.weights or not expected.moved > 1e-9:
        return f"one process has {len(expected.weights)} weights, which move by {expected.moved}"
    for number, rank in enumerate(ranks):
        if not set(program.plan.split()) <= set(rank.plan.split()):
            return f"rank {number} trained under {rank.plan!r}, not under {program.plan!r}"
    return ""


def _known(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> set[str]:
    """Return the names that a state needs; a tensor of two names may have only one of them."""
    present = [x for name, x in theirs.items() if name in ours]
    return {name for name, x in theirs.items() if name in ours or not any(x.equal(other) for other in present)}


def _of_tensors(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return math.inf
    if not (expected.is_floating_point() or expected.is_complex()) or not expected.numel():
        return 0.0 if actual.equal(expected) else math.inf
    difference = relative_difference(actual, expected)
    return math.inf if math.isnan(difference) else difference


def _pairs(ours: list[Any], theirs: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(ours, theirs, strict=True)) if len(ours) == len(theirs) else [(ours, theirs)]


def _relative(actual: Any, expected: Any) -> float:
    if isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        return max(map(_relative, actual, expected), default=0.0)
    if not isinstance(actual, int | float) or not isinstance(expected, int | float):
        return 0.0 if actual == expected else math.inf
    difference = abs(actual - expected) / max(abs(expected), 1e-12)
    return 0.0 if actual == expected else math.inf if math.isnan(difference) else difference


def _is_ours(failure: Failure) -> bool:
    """Return whether an error is one of Meshwright's: of its classes, or a ValueError that its code raises."""
    if failure.type_name in _CURABLE:  # unless another library has a class of this name, as torch's CheckpointError
        return not re.search(rf"^(?!meshwright)\w[\w.]*\.{failure.type_name}\b", failure.traceback, re.MULTILINE)
    raised = list(re.finditer(r'File "', failure.traceback))
    last = failure.traceback[raised[-1].start() :] if raised else ""
    return failure.type_name == "ValueError" and _RAISED.match(last) is not None


def _said_at_the_end(failure: Failure) -> Failure:
    """Return the error with which Meshwright ended a process whose program had caught it, if that is a failure."""
    said = _SWALLOWED.search(failure.traceback) if failure.type_name == "WorkerDied" else None
    return failure if said is None else replace(failure, type_name="DivergenceError", message=said[0])


def _last_line(text: str) -> str:
    return [line for line in text.splitlines() if line.strip()][-1][:300]
