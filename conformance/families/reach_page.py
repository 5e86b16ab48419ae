"""Writes evidence/models.md and evidence/models.json from the results of the sweep over all mappings.

python -m conformance.families.reach_page reach.jsonl
python -m conformance.families.reach_page --keep some.jsonl    # after a few programs have run again

Programs read the JSON file, which has one line per type. Tests read both files back and compare them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

from conformance.families.kept_results import read
from conformance.families.markdown import paragraph, table
from conformance.families.parity import TOLERANCE
from conformance.families.reach import PLANS
from conformance.families.tiny_models import MAPPINGS, types_of
from conformance.families.type_ranks import STATUSES, Cell

EVIDENCE = Path(__file__).resolve().parents[2] / "evidence"
PAGE, DATA = EVIDENCE / "models.md", EVIDENCE / "models.json"
_WORDS = {"crashes": "error", "unbuilt": "no model"}
_LONGEST = 200  # characters of a reason in the data
_GROUPED = 120  # characters of a reason on the page; types whose reasons begin alike share a number


@dataclass(frozen=True)
class Row:
    """The cells of a type, by plan; a plan that was not run has none."""

    mapping: str
    model_type: str
    cells: Mapping[str, Cell]


def rows_of(results: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return a row for each type of each mapping, from the lines of a results file."""
    rows = []
    for mapping in MAPPINGS:
        for name in types_of(mapping):
            found = {plan: results.get(f"{mapping}: {name}: {plan}") for plan in PLANS}
            cells = {plan: Cell(**cell) for plan, cell in found.items() if cell is not None}
            rows.append(Row(mapping, name, cells))
    return rows


def results_of(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Return the lines of a results file that give these rows, as :func:`rows_of` reads them."""
    return {
        f"{row.mapping}: {row.model_type}: {plan}": asdict(cell) for row in rows for plan, cell in row.cells.items()
    }


def to_json(rows: list[Row]) -> str:
    """Return the rows as JSON: for each plan the difference of an equal type, or the status and the reason."""
    lines = []
    for row in rows:
        cells = {
            plan: cell.difference if cell.status == "equal" else [cell.status, cell.difference, _short(cell.reason)]
            for plan, cell in row.cells.items()
        }
        lines.append(json.dumps({"mapping": row.mapping, "type": row.model_type, "cells": cells}))
    head = json.dumps({"transformers": transformers.__version__, "torch": torch.__version__})
    return f'{{"versions": {head}, "rows": [\n' + ",\n".join(lines) + "\n]}\n"


def from_json(text: str) -> tuple[dict[str, str], list[Row]]:
    """Return the versions and the rows that :func:`to_json` has written."""
    given = json.loads(text)
    rows = []
    for row in given["rows"]:
        cells = {p: Cell(*c) if isinstance(c, list) else Cell("equal", c) for p, c in row["cells"].items()}
        rows.append(Row(row["mapping"], row["type"], cells))
    return given["versions"], rows


def _short(reason: str) -> str:
    text = " ".join(reason.replace("|", "/").split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rsplit(' ', 1)[0]} ..."


def counts(rows: list[Row]) -> dict[tuple[str, str], Counter[str]]:
    """Return how many types of a mapping have each status under a plan: (mapping, plan) -> status -> number."""
    found: dict[tuple[str, str], Counter[str]] = {(m, p): Counter() for m in MAPPINGS for p in PLANS}
    for row in rows:
        for plan in PLANS:
            found[row.mapping, plan][row.cells[plan].status if plan in row.cells else "not run"] += 1
    return found


def render(versions: Mapping[str, str], rows: list[Row]) -> str:
    """Return the page's text."""
    found = counts(rows)
    sizes = {mapping: sum(found[mapping, PLANS[0]].values()) for mapping in MAPPINGS}
    equal = sum(of_plan["equal"] for of_plan in found.values())
    largest = max((c.difference or 0.0 for row in rows for c in row.cells.values() if c.status == "equal"), default=0.0)
    notes: dict[str, int] = {}
    lines = list(_body(rows, notes))
    return "\n".join(
        [
            "# All models of transformers",
            "",
            "```bash",
            "make families    # runs all sweeps of families and writes this page; less than an hour on 2 cores",
            "python -m conformance.families.reach --only llava --plan tp2+sp    # one program",
            "```",
            "",
            paragraph(
                f"{equal} of {len(rows) * len(PLANS)} programs equal one device: every type of five mappings of "
                f"transformers {versions['transformers']} under {len(PLANS)} plans on two ranks, with torch "
                f"{versions['torch']}. Each type is a tiny model with random weights, which has every kind of layer "
                "that its default config has, and further kinds that its code names where such a config is valid. "
                "Dropout, noise and other random draws are off here; [draws.md](draws.md) has them. A "
                "batch has two rows, each with an image or a sound if the mapping says so. A program says what its "
                "loss averages over if that is not known, and gathers the logits or freezes the statistics of batch "
                "norms if an error asks for it. Of a type that only generates, the part that computes a loss runs. A "
                "program runs in float64, one step. The loss, the norm and the gradient of every parameter differ by "
                f"at most {TOLERANCE:g} of a tensor's largest value; the largest difference of these programs is "
                f"{largest:.0e}. Configs and batches follow from the structure "
                "(`conformance/families/tiny_configs.py`), so a type of a new release is tried without code."
            ),
            "",
            "- equal: the numbers of one device",
            "- refused: a `PlanError` before anything is changed, or in the first pass, on every rank",
            "- error: another error ends the program; its numbers are not used",
            "- **differs**: other numbers than one device, without an error",
            "- no model: no tiny model or batch is found, or a package is missing",
            "",
            paragraph(
                "`evidence/models.json` has the same rows for programs. [families.md](families.md) compares "
                "causal LMs with more traits, such as packed rows and tied weights."
            ),
            "",
            *table(
                ["mapping", "plan", "types", *(_WORDS.get(status, status) for status in STATUSES), "not run"],
                (
                    [m, p, str(sizes[m]), *(str(of_plan[status]) for status in (*STATUSES, "not run"))]
                    for (m, p), of_plan in found.items()
                ),
            ),
            "",
            "## Every type",
            "",
            "A number in parentheses is that of a reason [below](#reasons).",
            "",
            *table(["type", "mapping", *PLANS], lines),
            "",
            "## Reasons",
            "",
            *(f"{number}. {reason}" for reason, number in notes.items()),
            "",
        ]
    )


def _body(rows: list[Row], notes: dict[str, int]) -> Iterator[list[str]]:
    for row in rows:
        yield [row.model_type, row.mapping, *(_cell(row.cells.get(plan), notes) for plan in PLANS)]


def _cell(cell: Cell | None, notes: dict[str, int]) -> str:
    if cell is None or cell.status == "equal":
        return "not run" if cell is None else "equal"
    if cell.status == "differs":
        size = "" if cell.difference is None else f" ({cell.difference:.0e})"
        return f"**differs**{size}"
    number = notes.setdefault(_without_names(cell.reason), len(notes) + 1)
    return f"{_WORDS.get(cell.status, cell.status)} ({number})"


def _without_names(reason: str) -> str:
    """Return a reason without the names and numbers of one type, so that types with one reason share it."""
    reason = re.sub(r"\b\w+For[A-Z]\w+|\b\w+LMHeadModel\b", "the model", reason)
    reason = re.sub(r"\b[A-Z]\w+(Attention|Mixer|Layer|Block|Model|Encoder|Decoder)\b", r"its \1", reason)
    reason = re.sub(r"\b\d+ (parameter|more|stacks)", r"some \1", reason)
    reason = re.sub(r"(layers?|blocks?|h)\.\d+", r"\1.0", reason)
    start = re.split(r" \(|: train it|; give a plan|[.] Use", reason)[0]
    if len(start) < len(reason):
        return start.replace("<", "&lt;").replace("*", "\\*")
    return (reason[:_GROUPED].rsplit(" ", 1)[0] + " ...").replace("<", "&lt;").replace("*", "\\*")


def table_of(text: str) -> dict[tuple[str, str], list[str]]:
    """Return (mapping, type) -> the cells of its row in the page's table of every type."""
    part = text.split("## Every type")[1].split("\n## ")[0]
    cells = [[x.strip() for x in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| ")]
    return {(mapping, name): rest for name, mapping, *rest in cells[1:]}


def main(
    results: Annotated[list[Path], typer.Argument(help="files that conformance.families.reach wrote")],
    keep: Annotated[bool, typer.Option("--keep", help="keep what the page says of programs that no file has")] = False,
) -> None:
    """Write models.json and models.md of evidence/ from the results of sweeps; later files replace earlier ones."""
    kept = results_of(from_json(DATA.read_text())[1]) if keep else {}
    DATA.write_text(to_json(rows_of(kept | read(results))))
    versions, rows = from_json(DATA.read_text())
    PAGE.write_text(render(versions, rows))
    print(f"{len(rows)} types: {PAGE}, {DATA}")


if __name__ == "__main__":
    typer.run(main)
