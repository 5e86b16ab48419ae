"""Writes evidence/draws.md from the results of the sweep over types that draw at random.

python -m conformance.families.draws_page draws.jsonl
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

from conformance.families.draws import ADDED, PLANS, STATUSES, STEPS, TYPES
from conformance.families.kept_results import read
from conformance.families.markdown import paragraph, table
from conformance.families.parity import TOLERANCE

PAGE = Path(__file__).resolve().parents[2] / "evidence" / "draws.md"
_LONGEST = 160  # characters of a reason


def render(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page's text."""
    names = [*TYPES, *ADDED]
    cells = {(name, plan): results[f"{name}: {plan}"] for name in names for plan in PLANS}
    counts = Counter(cell["status"] for cell in cells.values())
    largest = max((cell["difference"] for cell in cells.values() if cell["status"] == "equal"), default=0.0)
    reasons: dict[str, int] = {}

    def words(cell: Mapping[str, Any]) -> str:
        if cell["status"] == "equal":
            return "equal"
        number = reasons.setdefault(_short(cell["reason"]), len(reasons) + 1)
        return f"{cell['status']} ({number})"

    rows = [[name, *(words(cells[name, plan]) for plan in PLANS)] for name in names]
    return "\n".join(
        [
            "# Types that draw at random",
            "",
            "```bash",
            "python -m conformance.families.draws --results draws.jsonl    # a quarter of an hour on 2 cores",
            "python -m conformance.families.draws_page draws.jsonl         # writes this page",
            "```",
            "",
            paragraph(
                f"{counts['equal']} of {len(cells)} programs equal one device: {len(names)} programs of transformers "
                f"{transformers.__version__} with torch {torch.__version__}, as tiny models with random weights, and "
                "with the dropout, layerdrop, noise and masks that their configs have by default. Each has four rows "
                f"and trains {STEPS} steps by AdamW in float64, from one seed. The losses, the norms, the gradients of "
                f"the last step and the weights after it differ by at most {TOLERANCE:g} of a tensor's largest value; "
                f"the largest difference is {largest:.0e}. A mask of its own changes a loss by a hundredth."
            ),
            "",
            "- equal: the numbers of one device",
            "- told: other numbers than one device, and a warning that names the draw",
            "- refused: a `PlanError` on every rank",
            "",
            *table(list(STATUSES), [[str(counts[status]) for status in STATUSES]]),
            "",
            *table(["program", *PLANS], rows),
            "",
            "## Reasons",
            "",
            *(f"{number}. {reason}" for reason, number in reasons.items()),
            "",
        ]
    )


def _short(reason: str) -> str:
    text = " ".join(reason.replace("|", "/").split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rsplit(' ', 1)[0]} ..."


def main(results: Annotated[list[Path], typer.Argument(help="files that conformance.families.draws wrote")]) -> None:
    """Write evidence/draws.md from the results of a sweep; later files replace earlier ones."""
    PAGE.write_text(render(read(results)))
    print(PAGE)


if __name__ == "__main__":
    typer.run(main)
