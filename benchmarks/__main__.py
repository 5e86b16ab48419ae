"""``python -m benchmarks``: start the benchmark processes, which print the tables."""

from __future__ import annotations

import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.compare import FIGURES
from benchmarks.contenders import CONTESTS

PROCESSES = 2
ROOT = Path(__file__).resolve().parent.parent


class Contest(StrEnum):
    """The contests to run."""

    tp = "tp"
    dp = "dp"
    all = "all"


def worker_environment() -> dict[str, str]:
    """Return the environment of the benchmark processes: one thread each, loopback only, few log messages."""
    paths = [str(ROOT), str(ROOT / "plugin"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "PYTHONWARNINGS": "ignore",
        "TQDM_DISABLE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def launch(arguments: list[str]) -> int:
    """Run ``benchmarks.compare`` under torchrun on a free loopback port, and return its exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={PROCESSES}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += ["-m", "benchmarks.compare", *arguments]
    return subprocess.run(command, env=worker_environment(), check=False).returncode


def main(
    contest: Annotated[Contest, typer.Option(help="tensor parallel, data parallel, or both")] = Contest.all,
    rounds: Annotated[int, typer.Option(min=1, help="turns that each contender takes")] = 10,
    only: Annotated[
        list[str] | None, typer.Option(help="a contender's name as in the table; may be given several times")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="measure saved activation bytes per rank instead of step time")
    ] = False,
    collectives: Annotated[
        bool, typer.Option("--collectives", help="count collectives per decoder layer instead of step time")
    ] = False,
    guard: Annotated[
        bool, typer.Option("--guard", help="measure the share of our steps spent comparing ranks")
    ] = False,
    output: Annotated[Path, typer.Option(help="folder of the JSON records")] = Path("runs/bench"),
) -> None:
    """Compare this project with other libraries: same model, same data, 2 processes of 1 thread on CPU.

    Contest tp splits the model over the 2 processes, contest dp splits the batch.

    All contenders of a contest run in the same processes and take turns step by step, so that other load on
    the machine affects all of them equally. Ratios are taken within a round of turns. A step is forward,
    backward, AdamW and zero_grad, without clipping, on a Llama of 45 M parameters and 4 x 512 tokens in
    float32. Before a contender is timed, its losses must equal those of one process. The row of a library
    that is not installed says so.

    Examples:

    $ python -m benchmarks

    $ python -m benchmarks --contest tp --rounds 20

    $ python -m benchmarks --contest tp --only "ours tp2+sp" --only "one process"

    $ python -m benchmarks --contest tp --memory

    $ python -m benchmarks --contest dp --guard
    """
    if memory + collectives + guard > 1:
        raise typer.BadParameter("--memory, --collectives and --guard print different tables; give one of them")
    names = only or []
    contests = list(CONTESTS) if contest is Contest.all else [contest.value]
    known = [entry.name for chosen in contests for entry in CONTESTS[chosen]]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"--only {name!r} is not a contender; the contenders of {contests} are {known}")
    figure = "memory" if memory else "collectives" if collectives else "guard" if guard else "time"
    assert figure in FIGURES
    for chosen in contests:
        arguments = [f"--contest={chosen}", f"--figure={figure}", f"--rounds={rounds}"]
        arguments += [f"--only={name}" for name in names]
        status = launch([*arguments, f"--output={output / f'{chosen}-{figure}.json'}"])
        if status != 0:
            raise typer.Exit(status)


if __name__ == "__main__":
    application = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    application.command()(main)
    application()
