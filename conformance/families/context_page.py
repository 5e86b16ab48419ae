"""Writes evidence/families_context.md from the results of sweeps; a test compares the page with the planner's tables.

python -m conformance.families.context_page cp2.jsonl cp4.jsonl
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer

from conformance.families import page
from conformance.families.context import Differences
from conformance.families.kept_results import read
from conformance.families.markdown import paragraph, table
from conformance.families.models import DENSE, model_types
from conformance.families.one_device import ROWS
from conformance.families.page import verdict
from conformance.families.parity import TOLERANCE
from meshwright.plan.parts import METHODS

PAGE = Path(__file__).resolve().parents[2] / "evidence" / "families_context.md"
REFUSED = "refused"


Results = dict[str, dict[str, dict[int, Differences | str]]]  # family -> method -> cp -> result


def render(programs: Mapping[str, Differences | str]) -> str:
    """Return the page's text, given the result of each program of a sweep."""
    found: Results = defaultdict(lambda: defaultdict(dict))
    for program, result in sorted(programs.items()):
        family, method, cp = program.split()
        found[family][method][int(cp.removeprefix("cp"))] = result
    sizes = sorted({cp for methods in found.values() for of_method in methods.values() for cp in of_method})
    differences = [off for result in programs.values() if not isinstance(result, str) for off in result.values()]
    lines = [
        "# Families under context parallelism",
        "",
        "```bash",
        *(
            f"torchrun --nproc-per-node {cp} -m conformance.families.context --results cp{cp}.jsonl    # the sweep"
            for cp in sizes
        ),
        f"python -m conformance.families.context_page {' '.join(f'cp{cp}.jsonl' for cp in sizes)}    # this page",
        "```",
        "",
        paragraph(
            f"Each of {len(found)} dense decoders of transformers {transformers.__version__} runs under each method of "
            f"[context parallelism](../docs/context.md) on {' and on '.join(map(str, sizes))} ranks, with torch "
            f"{torch.__version__}: a model of two layers with random weights and biases, in float64, with "
            f"{_list(ROWS)} rows. The loss, the norm and every gradient are compared with one device. "
            f"{sum(off <= TOLERANCE for off in differences)} of {len(differences)} programs differ by at most "
            f"{TOLERANCE:g} of a tensor's largest value; the largest difference is {max(differences):.0e}. "
            'Under "hybrid", pairs of ranks exchange heads, and the two pairs form a ring.'
        ),
        "",
        *table(
            ["family", *METHODS],
            ([family, *(_cell(methods[method]) for method in METHODS)] for family, methods in found.items()),
        ),
        "",
        "## Why a plan is refused",
        "",
        "`to_distributed` raises this `PlanError` on every rank, before anything is changed.",
        "",
        *table(["family", "methods", "reason"], _reasons(found)),
    ]
    return "\n".join(lines) + "\n"


def _list(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}"


def _cell(results: dict[int, Differences | str]) -> str:
    """Return "yes", "refused" or the largest difference, for each cp if they differ; a dash if there is no result."""
    verdicts = {
        cp: REFUSED if isinstance(result, str) else verdict(max(result.values())) for cp, result in results.items()
    }
    if len(set(verdicts.values())) <= 1:
        return next(iter(verdicts.values()), "-")
    return ", ".join(f"cp{cp}: {verdicts[cp]}" for cp in sorted(verdicts))


def _reasons(found: Results) -> Iterator[list[str]]:
    for family, methods in found.items():
        of_reason: dict[str, list[str]] = defaultdict(list)
        for method in METHODS:
            for reason in dict.fromkeys(result for result in methods[method].values() if isinstance(result, str)):
                of_reason[_without_method(reason, method)].append(method)
        for reason, names in of_reason.items():
            yield [family, "all" if len(names) == len(METHODS) else ", ".join(names), reason.replace("|", "/")]


def _without_method(reason: str, method: str) -> str:
    return " ".join(reason.replace(f"ParallelPlan.context={method!r}", "the method").split())


def rows(text: str) -> dict[str, list[str]]:
    """Return family -> the cells of its row in the first table of the page."""
    return page.rows(text.split("\n## ")[0])


def main(
    results: Annotated[list[Path], typer.Argument(help="files that conformance.families.context wrote")],
    output: Annotated[Path, typer.Option(help="the page to write")] = PAGE,
) -> None:
    """Write the page from the results of sweeps; every family and method must have one."""
    found = read(results)
    missing = (DENSE.keys() & set(model_types())) - {program.split()[0] for program in found}
    if missing:
        raise typer.BadParameter(f"no results of {', '.join(sorted(missing))}; run the sweep again, and it continues")
    output.write_text(render(found))


if __name__ == "__main__":
    typer.run(main)
