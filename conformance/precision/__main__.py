"""``python -m conformance.precision``: compare float8 training under plans with one device, and print a table."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import typer

from conformance.families.markdown import table
from harness.torchrun import torchrun

COLUMNS = ("recipe", "plan", "scales", "largest difference of a loss in float32")


def main() -> None:
    """Train 20 steps with torchao's emulation on two ranks under each plan, and compare with one device.

    Needs torchao. Exits with status 1 if, with sums in float64, a scale differs by a bit or a loss by more than 1e-6.

    Examples:

        python -m conformance.precision
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        if torchrun(2, "conformance.precision.sweep", str(path)):
            raise typer.Exit(1)
        records = json.loads(path.read_text())
    rows = [(recipe, plan, "bitwise" if equal else "differ", f"{worst:.1e}") for recipe, plan, equal, worst in records]
    print("\n".join(table(COLUMNS, rows)))
    raise typer.Exit(0 if all(equal for _, _, equal, _ in records) else 1)


if __name__ == "__main__":
    typer.run(main)
