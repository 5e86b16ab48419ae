"""``python -m benchmarks.published_runs``: compares the planner's estimates with a table of measured runs."""

from __future__ import annotations

import json as json_format
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.published_runs.report import validation_dict, validation_table
from benchmarks.published_runs.score import validate
from benchmarks.published_runs.table import read_runs, summary
from meshwright_plan.machine.hardware import HardwareProfile


class LeaveOut(StrEnum):
    """The measured runs that are scored after calibration."""

    rows = "rows"
    model = "model"
    gpus = "gpus"
    test = "test"


def main(
    runs: Annotated[Path, typer.Argument(help="CSV file of measured runs, with the columns of tests/data.")],
    calibrate_rows: Annotated[
        int, typer.Option(help="Number of runs of each source to fit the coefficients to first.")
    ] = 0,
    seed: Annotated[
        int,
        typer.Option(
            help="With --calibrate-rows, seed of the random half of the runs from which the runs to fit are chosen."
        ),
    ] = 0,
    leave_out: Annotated[
        LeaveOut,
        typer.Option(
            help="Runs to score: rows (all that were not fitted), model (one model at a time, fitted on the others), "
            "gpus (the larger GPU counts, fitted on the smaller) or test (the test split)."
        ),
    ] = LeaveOut.rows,
    profile: Annotated[
        Path | None,
        typer.Option(help="Profile that meshwright calibrate wrote (default: data sheets and typical efficiencies)."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Print how far the estimates are from the runs of a CSV file."""
    dropped: list[str] = []
    try:
        measured = read_runs(runs, dropped)
        for line in summary(dropped):
            typer.echo(f"dropped: {line}", err=True)
        scores = validate(
            measured,
            calibrate_rows=calibrate_rows,
            seed=seed,
            leave=leave_out.value,
            profile=HardwareProfile.load(profile) if profile else None,
        )
    except ValueError as error:
        typer.echo(f"benchmarks.published_runs: {error}", err=True)
        sys.exit(2)
    typer.echo(json_format.dumps(validation_dict(scores), indent=2) if json else validation_table(scores))
    # Data is all that stands on stdout under --json.
    used, rows = len(measured), len(measured) + len(dropped)
    typer.echo(f"{runs}: {used:,} of {rows:,} rows used, {len(dropped):,} dropped", err=json)


if __name__ == "__main__":
    typer.run(main)
