"""Runs a contest: checks the contenders against one process, then lets them take turns step by step."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from benchmarks.contenders import ONE_PROCESS, Entry
from benchmarks.rounds import Round, Step, Turn
from benchmarks.teams import Team
from benchmarks.workload import Workload

WARM_UP_STEPS = 3
TOLERANCE = 1e-4  # relative; float32 sums in another order stay well below it over the warm-up
# torch's own norm of one process, in float32 on CPU, is off by 2e-4 here (by up to 1e-3 on larger tensors). Gradients
# that are averaged or summed wrongly are off by a factor.
NORM_TOLERANCE = 1e-3


class WrongAnswerError(RuntimeError):
    """Raised if a contender's numbers are not those of one process, so that its time is meaningless."""


def race(contest: Sequence[Entry], names: Sequence[str], workload: Workload, count: int, rounds: list[Round]) -> None:
    """Let contenders take turns, and append each round to ``rounds`` as it is measured, for a caller that interrupts.

    In a round every contender takes one step, in a new seeded order. In a fixed order the same contender would always
    follow the one that leaves a core idle.

    Args:
        contest: all contenders of the contest, with the one-process contender.
        names: the contenders to time; all are checked first.
        workload: what to train.
        count: the number of rounds.
        rounds: a list to which the rounds are appended.

    Raises:
        WrongAnswerError: if a contender's losses or norms are not those of one process.
        ContenderFailedError: if a contender raises an error.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # The progress bar is redrawn only when a step ends, since the contenders need the cores.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        shown = progress.add_task("starting", total=len(names))
        with _checked_teams(contest, names, workload, progress, shown) as teams:
            progress.reset(shown, total=count * len(names))
            order, draw = list(names), random.Random(0)
            for number in range(1, count + 1):
                draw.shuffle(order)
                rounds.append(Round(order=list(order), load_average=os.getloadavg()[0]))
                for name in order:
                    progress.update(shown, description=f"round {number}: {name}", refresh=True)
                    rounds[-1].steps[name] = Step.of_ranks(teams[name].step())
                    progress.advance(shown)


@contextmanager
def _checked_teams(
    contest: Sequence[Entry], names: Sequence[str], workload: Workload, progress: Progress, shown: TaskID
) -> Iterator[dict[str, Team]]:
    """Start the processes of the contenders, check their first steps, and end the processes after the contest."""
    teams: dict[str, Team] = {}
    entries = sorted(
        (entry for entry in contest if entry.name in {*names, ONE_PROCESS}), key=lambda entry: entry.name != ONE_PROCESS
    )
    expected: list[list[Turn]] = []
    try:
        for entry in entries:
            progress.update(shown, description=f"starting {entry.name}", refresh=True)
            teams[entry.name] = team = Team(entry, workload)
            turns = [team.step() for _ in range(WARM_UP_STEPS)]
            expected = expected or turns
            check(entry.name, turns, expected)
            if entry.name in names:
                progress.advance(shown)
            else:
                teams.pop(entry.name).close()
        yield teams
    finally:
        for team in teams.values():
            team.close()


def check(name: str, steps: Sequence[Sequence[Turn]], expected: Sequence[Sequence[Turn]]) -> None:
    """Compare the first steps of a contender, each a turn per rank, with those of one process.

    The first loss checks the forward pass, the norms check the gradients, and the next losses check the updates.

    Raises:
        WrongAnswerError: if a loss, averaged over the ranks, or a norm of the gradients differs.
    """
    for number, (turns, of_one) in enumerate(zip(steps, expected, strict=True)):
        one = of_one[0]
        figures = [("loss", fmean(turn.loss for turn in turns), one.loss, TOLERANCE)]
        if one.norm is not None:
            norms = [turn.norm for turn in turns if turn.norm is not None]
            figures += [("gradient norm", norm, one.norm, NORM_TOLERANCE) for norm in norms]
        for figure, found, wanted, tolerance in figures:
            if not abs(found - wanted) <= tolerance * abs(wanted):
                raise WrongAnswerError(f"{name}: {figure} {found:.6f} in step {number}, not {wanted:.6f}")
