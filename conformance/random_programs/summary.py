"""The table at the end of a run: the worst verdict of each trait under each plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from conformance.random_programs.compare import Outcome
from conformance.random_programs.draw import PLANS
from conformance.random_programs.trait import Verdict
from conformance.random_programs.traits import TRAITS

# From the best to the worst; a cell shows the worst.
MARKS: dict[Verdict, str] = {
    "equal": "=",
    "refused": "r",
    "warned": "w",
    "by design": "d",
    "illegal": "i",
    "nothing compared": "n",
    "false alarm": "f",
    "raw": "R",
    "hang": "H",
    "SILENT": "S",
}


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the table of traits and plans, with a legend; a dot stands for what was not drawn."""
    cells: dict[tuple[str, str], Verdict] = {}
    for outcome in outcomes:
        for name in outcome.program.names:
            cell = (name, outcome.program.plan)
            cells[cell] = max(cells.get(cell, "equal"), outcome.verdict, key=_rank)
    width = max(len(name) for name in TRAITS)
    lines = [" " * width + "  " + " ".join(f"{number:>2}" for number in range(1, len(PLANS) + 1))]
    for name in TRAITS:
        marks = [MARKS[cells[name, plan]] if (name, plan) in cells else "." for plan in PLANS]
        if set(marks) != {"."}:
            lines.append(f"{name:<{width}}  " + " ".join(f"{mark:>2}" for mark in marks))
    lines.append("plans: " + ", ".join(f"{number} {plan}" for number, plan in enumerate(PLANS, 1)))
    lines.append("marks: " + ", ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items()) + ", . not drawn")
    return "\n".join(lines)


def counts(outcomes: Iterable[Outcome]) -> str:
    """Return how many programs had each verdict, in words."""
    found = Counter(outcome.verdict for outcome in outcomes)
    return ", ".join(f"{number} {verdict}" for verdict, number in found.most_common()) or "nothing"


def _rank(verdict: Verdict) -> int:
    return list(MARKS).index(verdict)
