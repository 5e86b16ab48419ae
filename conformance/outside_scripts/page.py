"""Writes evidence/outside_scripts.md from the results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from textwrap import shorten

from conformance.outside_scripts.catalogue import LEFT_OUT, Script, Source


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One cell of the table.

    Args:
        kind: "equal", "differs", "refused" (before the first pass) or "late" (an error at a later time).
        detail: the largest relative difference, or the error.
    """

    kind: str
    detail: str

    @property
    def holds(self) -> bool:
        return self.kind in ("equal", "refused")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One script's verdicts by plan."""

    script: Script
    verdicts: Mapping[str, Verdict]


def version(checkout: Path, source: Source) -> str:
    """Return the version that a checkout declares, or the installed one for the folder of installed packages."""
    for place, pattern in ((f"src/{source}/__init__.py", r'__version__ = "([^"]+)"'), ("VERSION", r"(\S+)")):
        if (checkout / place).exists() and (found := re.search(pattern, (checkout / place).read_text())):
            return found[1]
    is_installed = checkout == Path(str(metadata.distribution(source).locate_file(""))).resolve()
    return metadata.version(source) if is_installed else "of an unknown version"


def render(rows: Sequence[Row], plans: Sequence[str], versions: Mapping[Source, str]) -> str:
    """Return the page's text."""
    cells = [verdict for row in rows for verdict in row.verdicts.values()]
    equal, refused = (sum(cell.kind == kind for cell in cells) for kind in ("equal", "refused"))
    names = ", ".join(f"{source} {version}" for source, version in versions.items())
    installed = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "accelerate", "trl"))
    lines = [
        "# Scripts of other projects",
        "",
        "```bash",
        "python -m conformance.outside_scripts --transformers ../transformers --trl ../trl --accelerate ../accelerate",
        "```",
        "",
        "The command takes checkouts of three projects. It runs their published scripts in one process and under four "
        f"plans, and writes this page. **Of {len(cells)} runs under a plan, {equal} are equal to the script in one "
        f"process, {refused} are refused before the first forward pass, and {len(cells) - equal - refused} differ.**",
        "",
        f"The scripts come from {names}. The installed versions are {installed}.",
        "",
        "Each script keeps its arguments. Only these lines change (the second column counts them):",
        "",
        "- In transformers' `run_clm.py`, `Trainer` is imported as `MeshwrightTrainer` "
        "([trainer.md](../docs/trainer.md)).",
        "- In TRL's scripts, the trainer's class gets the mixin `MeshwrightTrainerMixin`.",
        "- In scripts for accelerate, `Accelerator` is imported from `meshwright_hf.accelerate` "
        "([accelerate.md](../docs/accelerate.md)).",
        "",
        "The launcher sets the plan. A step has the same rows under every plan, so the script's arguments give each "
        "data-parallel rank its share of the rows.",
        "",
        f"| script | lines | {' | '.join(plans)} |",
        f"|---|---|{'---|' * len(plans)}",
        *(_row(row) for row in rows),
        "",
        "A number is the largest relative difference of the final weights and of all logged or printed numbers "
        "(losses, gradient norms, evaluation, rewards, metrics) from the unchanged script in one "
        f"process. A run counts as equal up to {_bounds(rows)}.",
        "",
        *_refusals(rows),
        "## What was run",
        "",
        "- The models are a Llama, a Llama with a classification head, and a BERT, with two layers and about 20,000 "
        "parameters. accelerate's examples load `bert-base-cased`; except in the row marked BERT, this name leads to "
        "the Llama with a head.",
        "- A run has 4 to 24 optimizer steps. Most scripts of accelerate warm up for 100 steps; the copies do so for 2 "
        "steps, with a higher learning rate and less data, so that a few steps show a difference. The run in one "
        "process has the same changes.",
        "- transformers' and accelerate's scripts run in float64, where only the order of sums differs. TRL's kernels "
        "compute in float32, so its scripts use SGD: Adam takes a full step even if a gradient is only a rounding "
        "error.",
        "- The package `evaluate` would download its metrics, so accuracy and F1 replace it.",
        "- `run_clm_no_trainer.py` with `--num_train_epochs` computes the length of its schedule from the number of "
        "batches of a process, and rounds it up. So the row marked as an epoch has 96 rows, which is divisible by the "
        "batches, dp and accumulation. With 98 rows it differed by 3e-2 under dp2: the learning rate ended after 6.5 "
        "updates instead of 7. Pass `--max_train_steps` for other numbers of rows.",
        "- Dropout is 0; [draws.md](draws.md) compares models with their own rates.",
        "",
        "Not run:",
        "",
        *(f"- {scripts} {reason}." for scripts, reason in LEFT_OUT.items()),
    ]
    return "\n".join(lines) + "\n"


def _row(row: Row) -> str:
    cells = " | ".join(_cell(verdict) for verdict in row.verdicts.values())
    name, _, remark = row.script.name.partition(" (")
    shown = f"{row.script.source} `{name}`" + (f" ({remark}" if remark else "")
    return f"| {shown} | {row.script.changed_lines} | {cells} |"


def _cell(verdict: Verdict) -> str:
    if verdict.kind == "equal":
        return verdict.detail
    return {"refused": "refused", "late": "**an error after the first pass**"}.get(
        verdict.kind, f"**differs** ({verdict.detail})"
    )


def _bounds(rows: Sequence[Row]) -> str:
    bounds = {row.script.source: row.script.tolerance for row in rows}
    return ", ".join(f"{bound:g} for {source}" for source, bound in bounds.items())


def _refusals(rows: Sequence[Row]) -> list[str]:
    """Return the section that quotes each error once."""
    found = {
        (row.script.name, verdict.detail.partition(": ")[2])
        for row in rows
        for verdict in row.verdicts.values()
        if verdict.kind in ("refused", "late")
    }
    if not found:
        return []
    quoted = [f"- `{name}`: {shorten(message, 300, placeholder=' ...')}" for name, message in sorted(found)]
    return ["## Errors", "", *quoted, ""]
