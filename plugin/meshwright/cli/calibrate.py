"""``meshwright calibrate``: what this machine really does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    output: Annotated[Path, typer.Option(help="The profile to write.")] = Path("profile.json"),
    processes: Annotated[
        int | None, typer.Option(help="To measure with at once; one for each GPU by default, or 2 on CPU.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="To compute in: float32, bfloat16 or float16; bfloat16 on GPUs, float32 on CPU.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="To spend measuring, about.")] = 100.0,
) -> None:
    """Measure this machine, so that plan's estimates are its own rather than the catalogue's.

    Measured are matmuls, attention and elementwise work by size, whole layers, the optimizer, collectives by size and
    group, and copies, on all processes at once, as in training. Train nothing else meanwhile: what runs beside it is
    measured too. On CPU each process has as many threads as OMP_NUM_THREADS says, one if it says nothing.

    For example:

      meshwright calibrate --output profile.json

      torchrun --nproc-per-node 8 --nnodes 2 ... -m meshwright.cli calibrate --output profile.json

      meshwright plan --model config.json --profile profile.json
    """
    try:
        from meshwright.calibration.measure import calibrate as measure
        from meshwright.calibration.profile_report import report

        if not output.parent.is_dir():
            raise ValueError(f"--output {output}: there is no directory {output.parent}")
        profile = measure(processes=processes, dtype=dtype, seconds=seconds)
        if profile is not None:
            profile.save(output)
            typer.echo(report(profile, output))
    except ValueError as error:
        typer.echo(f"meshwright calibrate: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("meshwright calibrate: interrupted, nothing was written", err=True)
        sys.exit(130)
