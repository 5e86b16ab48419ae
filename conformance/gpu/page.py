"""The page of a run: the machine, a table with a line for each section, and each section's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conformance.gpu.catalogue import section_named
from conformance.gpu.runner import Outcome

HEAD = "| section | state | seconds | found |\n|---|---|---|---|"


def table_line(outcome: Outcome) -> str:
    """Return a section's line of the table."""
    return f"| {outcome.name} | {outcome.state} | {outcome.seconds:.0f} | {_cell(outcome.line)} |"


def page(outcomes: Sequence[Outcome], machine: Mapping[str, Any]) -> str:
    """Return the page, in Markdown."""
    facts = [f"- {name}: {value}" for name, value in machine.items()]
    parts = ["# What a GPU says", "\n".join(facts), "\n".join([HEAD, *map(table_line, outcomes)])]
    for outcome in outcomes:
        parts.append(f"## {outcome.name}\n\n{section_named(outcome.name).question}")
        if outcome.checks:
            head = ["| what | figure | holds | |", "|---|---|---|---|"]
            parts.append("\n".join([*head, *(_check(check) for check in outcome.checks)]))
        else:
            parts.append(outcome.line)
        if outcome.output:
            parts.append(f"```text\n{outcome.output.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def _check(check: Any) -> str:
    holds = "" if check.goal is None else "yes" if check.holds else "**no**"
    details = "; ".join(f"{name} {value:.4g}" for name, value in (check.details or {}).items())
    remark = "; ".join(filter(None, (check.note, details)))
    return f"| {_cell(check.what)} | {_cell(check.words)} | {holds} | {_cell(remark)} |"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
