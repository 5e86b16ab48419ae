"""``python -m conformance.random_kills``: kill and stop the ranks of real runs, and count what holds."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from support.real_kills import Saves
from support.restarts import PLANS, Ended, Run, disturbed, stopped

TIMEOUT = 4.0  # seconds that a rank may be silent in the runs with a stopped rank
SPARE = 5.0  # seconds after the timeout in which the job must be over


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    what: str
    held: int
    tried: int
    remark: str


def main(
    runs: Annotated[int, typer.Option(help="runs with random kills and restarts")] = 20,
    stops: Annotated[int, typer.Option(help="runs with a stopped rank, for each launcher")] = 10,
    points: Annotated[int, typer.Option(help="kills at a step of a save")] = 200,
    seed: Annotated[int, typer.Option(help="seed of the random kills")] = 0,
) -> None:
    """Run programs under the launchers, kill or stop their ranks, and print a table of what held.

    Exits with status 1 if a run did not end as it must.

    Examples:

        python -m conformance.random_kills
        python -m conformance.random_kills --runs 2 --stops 0 --points 0
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        if runs:
            rows.append(restarts(Path(folder, "restarts"), runs, seed))
        for name, by_torchrun in (("meshwright launch", False), ("torchrun", True)):
            if stops:
                rows.append(stopped_ranks(Path(folder, name), stops, name, by_torchrun=by_torchrun))
        if points:
            rows.append(kills_in_saves(Path(folder, "saves"), points))
    table = Table("what was done", "held", "remark", title="kills")
    for row in rows:
        table.add_row(row.what, f"{row.held} of {row.tried}", row.remark)
    console = Console()
    console.width = max(console.width, 140)
    console.print(table)
    raise typer.Exit(any(row.held < row.tried for row in rows))


def restarts(folder: Path, count: int, seed: int) -> Row:
    """Kill ranks of runs at random; the restarted runs must end with the weights of undisturbed ones, bitwise."""
    draw, held, kills, expected = random.Random(seed), 0, 0, {}
    for number in range(count):
        run = Run(kind="trainer" if number % 4 == 3 else "loop", plan=PLANS[number % len(PLANS)], steps=15)
        if run not in expected:
            expected[run] = disturbed(run, folder / f"whole-{len(expected)}", 0, 0).result
            assert expected[run] is not None, "the undisturbed run failed"
        ended = disturbed(run, folder / str(number), draw.randint(1, 2), draw.randrange(2**32))
        is_equal = ended.code == 0 and ended.result == expected[run] and bool(ended.faults)
        held += is_equal
        kills += len(ended.faults)
        _say(f"run {number}: {run.kind} {run.plan}: {'; '.join(ended.faults)}", is_equal, ended)
    return Row(f"{kills} random SIGKILLs in {count} runs with restarts: weights of an undisturbed run, bitwise",
               held, count, "2 ranks; plain loop and Trainer; " + ", ".join(PLANS))  # fmt: skip


def stopped_ranks(folder: Path, count: int, launcher: str, *, by_torchrun: bool) -> Row:
    """Stop a rank for ever; the job must be over in time and name the rank."""
    held, longest = 0, 0.0
    for number in range(count):
        run = Run(kind="loop", plan=PLANS[number % 2], steps=10_000, timeout=TIMEOUT)
        victim = number % 2
        ended = stopped(run, folder / str(number), victim, by_torchrun=by_torchrun)
        is_named = f"meshwright: rank {victim} " in ended.output
        if not by_torchrun:
            is_named &= f"meshwright launch: rank {victim} was killed by" in ended.output
        is_right = ended.code != 0 and bool(ended.faults) and is_named and ended.after <= TIMEOUT + SPARE
        held, longest = held + is_right, max(longest, ended.after)
        _say(f"{launcher} {number}: {ended.after:.1f} s, named: {is_named}", is_right, ended)
    return Row(f"SIGSTOP of a rank under {launcher}: over within timeout + 5 s, the right rank named",
               held, count, f"timeout {TIMEOUT:g} s; the longest took {longest:.1f} s")  # fmt: skip


def kills_in_saves(folder: Path, count: int) -> Row:
    """Kill a rank at steps of its save; a load must find the old checkpoint or the new one, whole."""
    saves = [Saves(folder / f"ranks-{ranks}", ranks) for ranks in (2, 3, 4)]
    every = list(_points(saves))
    chosen = every if count >= len(every) else [every[index * len(every) // count] for index in range(count)]
    held = 0
    for number, (saving, victim, step) in enumerate(chosen):
        problem = saving.problem(victim, step, saves_again=number % 10 == 0)
        held += problem is None
        if problem is not None:
            print(f"rank {victim} of {saving.ranks} at step {step}: {problem}", flush=True)
        if (number + 1) % 10 == 0:
            print(f"{time.strftime('%H:%M:%S')} {held} of {number + 1} kills in saves held", flush=True)
    return Row("SIGKILL at a write, sync, rename or removal of a save: a load finds the old or the new, bitwise",
               held, len(chosen), f"{len(every)} such steps on 2, 3 and 4 ranks")  # fmt: skip


def _points(saves: list[Saves]) -> Iterator[tuple[Saves, int, int]]:
    for saving in saves:
        for victim, steps in enumerate(saving.steps):
            yield from ((saving, victim, step) for step in range(steps))


def _say(what: str, is_right: bool, ended: Ended) -> None:
    print(f"{time.strftime('%H:%M:%S')} {'held' if is_right else 'WRONG'} {what}", flush=True)
    if not is_right:
        print(f"exit code {ended.code}\n{ended.output}", flush=True)


if __name__ == "__main__":
    typer.run(main)
