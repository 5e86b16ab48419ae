"""What a section of ``python -m conformance.gpu`` is: a question, and checks that answer it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a section runs.

    Args:
        device: "cpu" or "cuda".
        seconds: the time for all of its checks; those that have not begun by then are left out, but for the first one
            with a goal.
        folder: an empty folder.
        plants: whether to plant a fault, which the section must then find.
    """

    device: str
    seconds: float
    folder: Path
    plants: bool = False

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def gpus(self) -> int:
        """The number of GPUs of this machine that the section uses."""
        return torch.cuda.device_count() if self.is_cuda else 0

    def goal(self, of_gpu: float, of_cpu: float | None = None) -> float | None:
        """Return the goal of a figure that depends on the device; None where the CPU's figure has no goal."""
        return of_gpu if self.is_cuda else of_cpu


@dataclass(frozen=True, kw_only=True)
class Check:
    """One figure, with its goal if it has one.

    Args:
        what: what was measured, in words.
        figure: the number; NaN fulfils no goal.
        unit: the unit in which it is written.
        goal: the most that it may be, or the least; None for a figure that is only reported.
        at_least: whether the goal is the least.
        note: a remark.
        details: further figures, by name.
        leaves_out: whether it says which checks the section leaves out, since they would not fit into its time.
    """

    what: str
    figure: float
    unit: str = ""
    goal: float | None = None
    at_least: bool = False
    note: str = ""
    details: dict[str, float] | None = None
    leaves_out: bool = False

    @property
    def holds(self) -> bool:
        """Whether the goal is reached; true without a goal."""
        if self.goal is None:
            return True
        return self.figure >= self.goal if self.at_least else self.figure <= self.goal

    @property
    def words(self) -> str:
        """The figure and its goal."""
        figure = f"{self.figure:.3g} {self.unit}".strip()
        if self.goal is None:
            return figure
        return f"{figure} (goal {'>=' if self.at_least else '<='} {self.goal:.3g})"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


class Section:
    """A part of the command that runs alone and ends in one line of a table; the base class of all sections.

    Attributes:
        name: its name on the command line.
        question: what it answers, in one sentence.
        share: its share of the time, relative to the other sections.
    """

    name: str
    question: str
    share: float

    def needs(self, place: Place) -> str | None:
        """Return what is missing for the section to run here; None if it can run."""
        return None

    def run(self, place: Place) -> Iterator[Check]:
        """Yield the checks as they are done."""
        raise NotImplementedError


def not_run(what: str, package: str) -> Check:
    """Return the line of a measurement that needs a package which is not installed."""
    return Check(what=f"{what}: was not measured", figure=float("nan"), note=f"{package} is not installed")


def attempt(what: str, run: Callable[..., Check | Iterable[Check]], *args: object) -> Iterator[Check]:
    """Yield the checks of a function; what it raises is a check that does not hold, so that the others still run.

    Args:
        what: what it checks, in words.
        run: the function, which returns a check or some.
        args: its arguments.
    """
    try:
        found = run(*args)
        yield from (found,) if isinstance(found, Check) else found
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [type(error).__name__]
        note = f"{type(error).__name__}: {lines[-1][:300]}"
        yield Check(what=f"{what}: errors that ended it", figure=1.0, goal=0.0, note=note)


def line_of(checks: Sequence[Check]) -> str:
    """Return a section's line of the table: how many goals are reached, and the figure furthest from its goal."""

    def distance(check: Check) -> float:
        assert check.goal is not None
        if check.figure != check.figure:
            return float("inf")
        if check.at_least:
            return check.goal / check.figure if check.figure else float("inf")
        return check.figure / check.goal if check.goal else float(check.figure > 0)

    judged = [check for check in checks if check.goal is not None]
    if not judged:
        return f"{len(checks)} figures, none of which has a goal here"
    furthest, held = max(judged, key=distance), sum(check.holds for check in judged)
    return f"{held} of {len(judged)} hold; furthest from its goal: {furthest.what}, {furthest.words}"
