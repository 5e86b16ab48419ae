"""Writes evidence/families_pipeline.md from the results of sweeps over pipeline stages.

torchrun --nproc-per-node 2 -m conformance.families.stages --results stages.jsonl
torchrun --nproc-per-node 4 -m conformance.families.stages --results stages.jsonl
python -m conformance.families.stages_page stages.jsonl
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer

from conformance.families.kept_results import read
from conformance.families.markdown import paragraph, table
from conformance.families.models import DENSE
from conformance.families.one_device import ROWS
from conformance.families.page import verdict
from conformance.families.parity import TOLERANCE

PAGE = Path(__file__).resolve().parents[2] / "evidence" / "families_pipeline.md"
STAGES = (2, 4)


def render(found: Mapping[str, float | str]) -> str:
    """Return the page's text, given the result of each program of a sweep."""
    families = sorted(family for family in DENSE if any(name.split()[0] == family for name in found))
    rows = [[_cell(found, family, kind, size) for size in STAGES for kind in ROWS] for family in families]
    exact = sum(cells.count("yes") for cells in rows)
    lines = [
        "# Families over pipeline stages",
        "",
        paragraph(
            f"{exact} of {len(rows) * len(STAGES) * len(ROWS)} programs equal one device: models of four layers with "
            "random weights, cut into 2 and 4 stages under 1f1b with two micro-batches, in float64, with transformers "
            f"{transformers.__version__} and torch {torch.__version__}. The loss, the norm and the gradient of every "
            f"parameter differ by at most {TOLERANCE:g} of a tensor's largest value. A packed row has two documents, "
            "and padded rows have padding on either side. This command writes the page:"
        ),
        "",
        "```bash",
        "torchrun --nproc-per-node 2 -m conformance.families.stages --results stages.jsonl",
        "torchrun --nproc-per-node 4 -m conformance.families.stages --results stages.jsonl",
        "python -m conformance.families.stages_page stages.jsonl",
        "```",
        "",
        *table(
            ["family", *(f"pp{size} {kind}" for size in STAGES for kind in ROWS)],
            ([family, *cells] for family, cells in zip(families, rows, strict=True)),
        ),
    ]
    return "\n".join(lines) + "\n"


def _cell(found: Mapping[str, float | str], family: str, kind: str, size: int) -> str:
    result = found.get(f"{family} {kind} 1f1b ranks={size}")
    if isinstance(result, str):
        return f"refused: {result.split('. Use')[0].replace('|', '/')}"
    return "not run" if result is None else verdict(result)


def main(
    results: Annotated[list[Path], typer.Argument(help="the files that the sweeps wrote")],
    output: Annotated[Path, typer.Option(help="the page to write")] = PAGE,
) -> None:
    """Write the page of the families over pipeline stages."""
    found = read(results)
    output.write_text(render(found))
    print(f"{len(found)} results: {output}")


if __name__ == "__main__":
    typer.run(main)
