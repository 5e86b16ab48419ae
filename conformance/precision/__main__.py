"""``python -m conformance.precision``: compare training in float8 and bfloat16 with one device, and print tables."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from conformance.families.markdown import table
from harness.torchrun import torchrun
from support.summation_orders import QUANTITIES

FLOAT8 = ("recipe", "plan", "scales", "largest difference of a loss in float32")
BF16 = (
    "weights",
    "plan",
    "gradients: median and farthest order",
    "this run",
    "weights: median and farthest order",
    "this run",
    f"runs as far ({', '.join(QUANTITIES)})",
)


def main(
    sections: Annotated[str, typer.Option(help="Sections to run, separated by commas.")] = "float8,bf16",
    orders: Annotated[int, typer.Option(help="Orders of summation with which a run in bfloat16 is compared.")] = 19,
) -> None:
    """Train under plans on two ranks and on one device, and compare.

    float8: 20 steps with torchao's emulation, which must be installed. Exits with status 1 if, with sums in float64, a
    scale differs by a bit or a loss by more than 1e-6.

    bf16: three steps. Exits with status 1 if, with each of two texts, a plan is farther from one run of one process
    than every other order of summation, or a planted fault is not.

    Examples:

        python -m conformance.precision

        python -m conformance.precision --sections bf16 --orders 99
    """
    known = {"float8": _float8, "bf16": lambda path: _bf16(path, orders)}
    asked = sections.split(",")
    if unknown := [name for name in asked if name not in known]:
        raise typer.BadParameter(f"{unknown[0]!r} is not a section; write --sections {','.join(known)}")
    with tempfile.TemporaryDirectory() as folder:
        passed = [known[name](Path(folder) / f"{name}.json") for name in asked]
    raise typer.Exit(0 if all(passed) else 1)


def _float8(path: Path) -> bool:
    records = _records("conformance.precision.sweep", path)
    rows = [(recipe, plan, "bitwise" if equal else "differ", f"{worst:.1e}") for recipe, plan, equal, worst in records]
    print("\n".join(table(FLOAT8, rows)))
    return all(equal for _, _, equal, _ in records)


def _bf16(path: Path, orders: int) -> bool:
    rows, passed = [], True
    for kind, name, is_fault, outside, places in _records("conformance.precision.orders", path, str(orders)):
        passed &= bool(outside) == is_fault
        sizes = [
            text
            for what in ("gradients", "weights")
            for text in (f"{places[what]['typical']:.1e}, {places[what]['largest']:.1e}", f"{places[what]['own']:.1e}")
        ]
        counts = ", ".join(
            f"**{places[what]['as_far']}**" if what in outside else str(places[what]["as_far"]) for what in QUANTITIES
        )
        rows.append((kind, f"fault: {name}" if is_fault else name, *sizes, counts))
    print("\n".join(table(BF16, rows)))
    return passed


def _records(module: str, path: Path, *arguments: str) -> Any:
    if torchrun(2, module, str(path), *arguments):
        raise typer.Exit(1)
    return json.loads(path.read_text())


if __name__ == "__main__":
    typer.run(main)
