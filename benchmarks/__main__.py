"""``python -m benchmarks``: compares this project with other libraries, and prints the tables."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.contenders import CONTESTS
from benchmarks.environment import environment
from benchmarks.race import WrongAnswerError, race
from benchmarks.report import compared, print_time
from benchmarks.rounds import Round
from benchmarks.teams import ContenderFailedError
from benchmarks.workload import Workload
from harness.torchrun import worker_environment


class Contest(StrEnum):
    """The contests to run."""

    tp = "tp"
    dp = "dp"
    all = "all"


def time_contests(contests: Sequence[str], names: Sequence[str], count: int, json_file: Path | None) -> int:
    """Measure and print step times. Measurements from before Ctrl-C or an error are printed and written too.

    Returns:
        The exit status: 130 after Ctrl-C, 1 after an error.
    """
    os.environ.update(worker_environment())  # the contenders' processes inherit it
    workload, records, status = Workload(), [], 0
    for contest in contests:
        entries = [entry for entry in CONTESTS[contest] if not names or entry.name in names]
        if not entries:
            continue  # --only names contenders of the other contest
        installed = [entry for entry in entries if entry.installed]
        absent = [entry.name for entry in entries if not entry.installed]
        about = {"contest": contest, "figure": "time", "workload": asdict(workload), **environment(), "absent": absent}
        rounds: list[Round] = []
        try:
            race(CONTESTS[contest], [entry.name for entry in installed], workload, count, rounds)
        except KeyboardInterrupt:
            status = 130
        except (ContenderFailedError, WrongAnswerError) as error:
            print(error, file=sys.stderr)
            status = 1
        if status:
            print(f"ended in round {len(rounds)} of {count}; the figures are of the steps before", file=sys.stderr)
        if rounds:
            print_time(contest, rounds, installed, absent)
        comparisons = compared(rounds, [entry.name for entry in installed])
        records.append({**about, "comparisons": list(map(asdict, comparisons)), "rounds": list(map(asdict, rounds))})
        if json_file is not None:
            json_file.write_text(json.dumps(records, indent=2) + "\n")
        if status:
            break
    return status


def main(
    contest: Annotated[Contest, typer.Option(help="Contest to run.")] = Contest.all,
    rounds: Annotated[int, typer.Option(min=1, help="Number of steps of each contender.")] = 20,
    only: Annotated[
        list[str] | None, typer.Option(help="Contender by its name in the table; may be given several times.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for all rounds, the machine and the versions, as JSON.")
    ] = None,
) -> None:
    """Compare this project with other libraries: same model, same data, 2 processes of 1 thread on CPU.

    Contest tp splits the model over the 2 processes, contest dp splits the batch.

    A step is forward, backward, clipping, AdamW and zero_grad, on a Llama of 45 M parameters and 4 x 512 tokens in
    float32. Each contender has its own processes. In each round every contender takes one step, in a new seeded order,
    while the others wait. Ratios are taken within a round, so that other load on the machine affects both sides, and
    printed as the median with its 95 % interval. Beside the wall time the tables have the CPU time of all ranks in user
    mode and in the kernel, and the time for which the ranks waited for a core: where that is not small, the machine was
    too busy for the wall time. No round is left out.

    Before a contender is timed, its losses and gradient norms must equal those of one process. transformers' own tensor
    parallelism cannot clip, so there only ours does. The row of a library that is not installed says so. Ctrl-C prints
    the figures of what was measured until then.

    Examples:

    $ python -m benchmarks

    $ python -m benchmarks --contest tp --rounds 40 --json tp.json

    $ python -m benchmarks --contest tp --only "ours tp2+sp" --only "one process"
    """
    names = only or []
    contests = list(CONTESTS) if contest is Contest.all else [contest.value]
    known = [entry.name for chosen in contests for entry in CONTESTS[chosen]]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"--only {name!r} is not a contender; the contenders of {contests} are {known}")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
    if status := time_contests(contests, names, rounds, json_file):
        raise typer.Exit(status)


if __name__ == "__main__":
    application = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    application.command()(main)
    application()
