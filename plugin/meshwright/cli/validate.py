"""``meshwright plan --validate``: compares the estimator with measured runs."""

from __future__ import annotations

import json as json_format
from enum import StrEnum
from pathlib import Path

import typer


class LeaveOut(StrEnum):
    """The measured runs that are scored after calibration."""

    rows = "rows"
    model = "model"
    gpus = "gpus"
    test = "test"


def validate_estimator(
    path: Path, calibrate_rows: int, seed: int, leave_out: LeaveOut, profile: Path | None, json: bool
) -> None:
    """Print how far the estimates are from the runs of a CSV file; the options are described in ``plan``."""
    # Imported here so that --help is fast.
    from meshwright.calibration.runs import read_runs, summary
    from meshwright.calibration.validate import validate
    from meshwright.calibration.validation_report import validation_dict, validation_table
    from meshwright.planner.hardware import HardwareProfile

    dropped: list[str] = []
    runs = read_runs(path, dropped)
    for line in summary(dropped):
        typer.echo(f"dropped: {line}", err=True)
    scores = validate(
        runs,
        calibrate_rows=calibrate_rows,
        seed=seed,
        leave=leave_out.value,
        profile=HardwareProfile.load(profile) if profile else None,
    )
    typer.echo(json_format.dumps(validation_dict(scores), indent=2) if json else validation_table(scores))
    # Data is all that stands on stdout under --json.
    typer.echo(f"{path}: {len(runs):,} of {len(runs) + len(dropped):,} rows used, {len(dropped):,} dropped", err=json)
