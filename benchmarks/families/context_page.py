"""Writes docs/families_context.md from the results of sweeps; a test compares the page with the planner's tables.

python -m benchmarks.families.context_page cp2.jsonl cp4.jsonl
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer

from benchmarks.families.context import ContextRecord, read
from benchmarks.families.models import DENSE, model_types
from benchmarks.families.one_device import ROWS
from benchmarks.families.parity import TOLERANCE
from meshwright.context.methods import METHODS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families_context.md"
REFUSED = "refused"


def render(records: Iterable[ContextRecord]) -> str:
    """Return the page's text."""
    found: dict[str, dict[str, list[ContextRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in sorted(records, key=lambda record: record.key):
        found[record.family][record.method].append(record)
    every = [record for methods in found.values() for of_method in methods.values() for record in of_method]
    sizes = sorted({record.cp for record in every})
    programs = [off for record in every for off in record.differences.values()]
    lines = [
        "# Families under context parallelism",
        "",
        "```bash",
        *(
            f"torchrun --nproc-per-node {cp} -m benchmarks.families.context --results cp{cp}.jsonl    # the sweep"
            for cp in sizes
        ),
        f"python -m benchmarks.families.context_page {' '.join(f'cp{cp}.jsonl' for cp in sizes)}    # this page",
        "```",
        "",
        f"Each of {len(found)} dense decoders of transformers {transformers.__version__} runs under each method of "
        f"[context parallelism](context.md) on {' and on '.join(map(str, sizes))} ranks, with torch "
        f"{torch.__version__}: a model of two layers with random weights and biases, in float64, with {_list(ROWS)} "
        "rows. The loss, the norm and every gradient are compared with one device. "
        f"{sum(off <= TOLERANCE for off in programs)} of {len(programs)} programs differ by at most {TOLERANCE:g} of a "
        f'tensor\'s largest value; the largest difference is {max(programs):.0e}. "hybrid" is 2 ranks that exchange '
        "heads in a ring of 2, on 4 ranks.",
        "",
        f"| family | {' | '.join(METHODS)} |",
        f"|---|{'---|' * len(METHODS)}",
        *(
            f"| {family} | {' | '.join(_cell(methods[method]) for method in METHODS)} |"
            for family, methods in sorted(found.items())
        ),
        "",
        "## Why a plan is refused",
        "",
        "`to_distributed` raises this `PlanError` on every rank, before anything is changed.",
        "",
        "| family | methods | reason |",
        "|---|---|---|",
        *_reasons(found),
    ]
    return "\n".join(lines) + "\n"


def _list(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}"


def _cell(records: list[ContextRecord]) -> str:
    """Return "yes", "refused" or the largest difference, for each cp if they differ; a dash if there is no result."""
    verdicts = {record.cp: _verdict(record) for record in records}
    if len(set(verdicts.values())) <= 1:
        return next(iter(verdicts.values()), "-")
    return ", ".join(f"cp{cp}: {verdict}" for cp, verdict in verdicts.items())


def _verdict(record: ContextRecord) -> str:
    if record.refusal:
        return REFUSED
    return f"**no** ({max(record.differences.values()):.0e})" if record.differs else "yes"


def _reasons(found: dict[str, dict[str, list[ContextRecord]]]) -> Iterable[str]:
    for family, methods in sorted(found.items()):
        of_reason: dict[str, list[str]] = defaultdict(list)
        for method in METHODS:
            for reason in dict.fromkeys(record.refusal for record in methods[method] if record.refusal):
                of_reason[_without_method(reason, method)].append(method)
        for reason, names in of_reason.items():
            named = "all" if len(names) == len(METHODS) else ", ".join(names)
            yield f"| {family} | {named} | {reason.replace('|', '/')} |"


def _without_method(reason: str, method: str) -> str:
    return " ".join(reason.replace(f"ParallelPlan.context={method!r}", "the method").split())


def rows(text: str) -> dict[str, list[str]]:
    """Return family -> the cells of its row in the first table of the page."""
    table = text.split("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("| ")]
    return {family: rest for family, *rest in cells if family != "family"}


def main(
    results: Annotated[list[Path], typer.Argument(help="files that benchmarks.families.context wrote")],
    output: Annotated[Path, typer.Option(help="the page to write")] = PAGE,
) -> None:
    """Write the page from the results of sweeps; every family and method must have one."""
    records = [record for path in results for record in read(path)]
    missing = (DENSE.keys() & set(model_types())) - {record.family for record in records}
    if missing:
        raise typer.BadParameter(f"no results of {', '.join(sorted(missing))}; run the sweep again, which goes on")
    output.write_text(render(records))


if __name__ == "__main__":
    typer.run(main)
