"""``python -m conformance.clusters``: kill and preempt jobs of a local Slurm and a local Ray, and count what holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from harness.slurm import Slurm, local_slurm, why_no_slurm
from support.preemptions import PER_NODE, Run

NODES = 2
PLAN = "dp2 tp2"
LEAST = 3  # steps between two disturbances
CONFIG = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32, \
"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "torch_dtype": "float32"}'


def main(
    runs: Annotated[int, typer.Option(help="jobs that are killed, preempted and requeued, each once")] = 10,
    first: Annotated[int, typer.Option(help="number of the first job, which says what is done to which rank")] = 0,
    kind: Annotated[str, typer.Option(help="loop or trainer")] = "loop",
) -> None:
    """Run jobs on two nodes of a local Slurm, disturb each three times, and print a table of what held.

    Exits with status 1 if a job did not end with the weights of an undisturbed one.

    Examples:

        python -m conformance.clusters
        python -m conformance.clusters --runs 1 --first 3
    """
    if why := why_no_slurm():
        raise typer.BadParameter(why)
    table = Table("what was done to jobs of 2 nodes x 2 ranks under Slurm", "held", title="clusters")
    with tempfile.TemporaryDirectory(prefix="clusters-") as folder, local_slurm(Path(folder, "slurm"), NODES) as slurm:
        batch = emitted(Path(folder), slurm)
        whole = Run(slurm=slurm, batch=batch, folder=Path(folder, "whole"), kind=kind)
        expected = whole.finish(whole.submit())
        if expected is None:
            print(whole.log)
            raise typer.Exit(1)
        held = dict.fromkeys(("train to the end", "a process is killed", "preempt", "requeue"), 0)
        for number in range(first, first + runs):
            run = Run(slurm=slurm, batch=batch, folder=Path(folder, f"job-{number}"), kind=kind)
            began = time.monotonic()
            went_on, result = disturbed(run, number)
            is_equal = result == expected and run.progress <= run.steps + 8
            for name, is_held in zip(held, (True, *went_on), strict=True):
                held[name] += is_held and is_equal
            words = f"{'; '.join(run.disturbances)}; {time.monotonic() - began:.0f} s"
            print(f"{time.strftime('%H:%M:%S')} {'held' if is_equal and all(went_on) else 'WRONG'} {words}", flush=True)
            if not is_equal:
                print(run.log, flush=True)
    for name, count in held.items():
        table.add_row(f"{name}: weights of an undisturbed job, bitwise", f"{count} of {runs}")
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    raise typer.Exit(any(count < runs for count in held.values()))


def emitted(folder: Path, slurm: Slurm) -> Path:
    """Write the batch file of the plan, whose commands are those of this checkout, and check it with sbatch."""
    (folder / "config.json").write_text(CONFIG)
    command = [
        sys.executable, "-m", "meshwright.cli", "plan", "weigh", "--model", str(folder / "config.json"),
        "--gpu", "cpu", "--gpus", str(NODES * PER_NODE), "--gpus-per-node", str(PER_NODE), "--seq-len", "12",
        "--global-batch", "4", "--plan", PLAN, "--emit", "slurm",
    ]  # fmt: skip
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ["OMP_NUM_THREADS"] = "1"
    batch = folder / "job.sbatch"
    batch.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    slurm.call("sbatch", "--test-only", str(batch))
    return batch


def disturbed(run: Run, number: int) -> tuple[list[bool], str | None]:
    """Kill a process of a job, preempt it and requeue it; return what it went on after, and the weights' digest."""
    job = run.submit()
    went_on = []
    rank = number % (NODES * PER_NODE)
    alone = signal.SIGUSR1 if rank % 2 else signal.SIGTERM
    for disturb in (
        lambda: run.kill(rank, launcher=number % 2 == 1),
        lambda: run.announce_end(job) if number % 3 else run.signal_rank(rank, alone),
        lambda: run.requeue(job),
    ):
        if run.train_on(job, LEAST):
            disturb()
        went_on.append(run.train_on(job, LEAST))
    return went_on, run.finish(job)


if __name__ == "__main__":
    typer.run(main)
