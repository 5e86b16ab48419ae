"""``meshwright calibrate``: measures this machine for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright_tools.cli.command import failures_of, say


def calibrate(
    output: Annotated[Path, typer.Option(help="File to write the profile to.")] = Path("profile.json"),
    processes: Annotated[
        int | None, typer.Option(help="Number of processes to measure on (default: one per GPU, or 2 on CPU).")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype to compute in: float32, bfloat16 or float16 (default: bfloat16 on GPUs, float32 on CPU)."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Approximate time to spend measuring, in seconds.")] = 100.0,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON too.")] = False,
) -> None:
    """Measure this machine and write a profile for meshwright plan.

    Without a profile, meshwright plan uses data sheets and typical efficiencies. This command measures matrix
    multiplications, attention and elementwise operations at several sizes; whole layers; the optimizer step;
    collectives at several message and group sizes; and host-device copies. All processes run at once, as in training.
    Run nothing else meanwhile: it would be measured too. On CPU each process has OMP_NUM_THREADS threads (default: 1,
    or torch's default with --processes 1).

    For example:

    \b
      meshwright calibrate --output profile.json
      torchrun --nproc-per-node 8 --nnodes 2 ... -m meshwright_tools.cli calibrate --output profile.json
      meshwright plan --model config.json --profile profile.json
    """
    with failures_of("calibrate", json=json, interrupted="interrupted; nothing was written"):
        from meshwright_tools.calibration.measure import calibrate as measure
        from meshwright_tools.calibration.measure import report

        if not output.parent.is_dir():
            raise ValueError(f"--output {output}: there is no directory {output.parent}; create it")
        profile = measure(processes=processes, dtype=dtype, seconds=seconds)
        if profile is not None:
            profile.save(output)
            say(output.read_text(encoding="utf-8") if json else report(profile, output))
