"""``python -m conformance.optimizers``: check the Trainer's optimizers by name, and print a table of what was found."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from conformance.families.markdown import table
from conformance.optimizers.check import PLANS, Record
from conformance.optimizers.sweep import read
from harness.torchrun import torchrun


def main(
    only: Annotated[list[str] | None, typer.Option(help="a name; may be given several times")] = None,
) -> None:
    """Compare the optimizers that ``TrainingArguments.optim`` can name, on two ranks, with one device.

    Libraries that are not installed give no result: bitsandbytes, torchao, schedulefree, galore-torch, apollo-torch,
    lomo-optim, grokadamw and torch-optimi. Exits with status 1 if an optimizer differs.

    Examples:

        python -m conformance.optimizers
        python -m conformance.optimizers --only adafactor
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        if torchrun(2, "conformance.optimizers.sweep", str(path), *(only or ())):
            raise typer.Exit(1)
        records = read(path)
    print("\n".join(rows(records)))
    raise typer.Exit(0 if all(record.passes for record in records) else 1)


def rows(records: list[Record]) -> list[str]:
    """Return the lines of the table."""
    return table(("`optim=`", "class", "reads", *PLANS), (_row(record) for record in records))


def _row(record: Record) -> list[str]:
    name = f"`{record.name}`"
    if record.missing:
        return [name, record.kind, "", f"not run here: {record.missing}", *[""] * (len(PLANS) - 1)]
    return [name, record.kind, record.reads, *(record.cells[plan] for plan in PLANS)]


if __name__ == "__main__":
    typer.run(main)
