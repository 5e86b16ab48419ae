"""``python -m conformance.random_programs``: compare random legal training programs with one process."""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections.abc import Collection, Iterator
from typing import Annotated

import typer
from rich.progress import track

from conformance.random_programs.compare import Outcome
from conformance.random_programs.draw import PLANS, Program
from conformance.random_programs.lanes import judged
from conformance.random_programs.plants import PLANTS
from conformance.random_programs.summary import counts, table
from conformance.random_programs.traits import TRAITS


def main(
    count: Annotated[int, typer.Option(help="number of programs")] = 2000,
    seed: Annotated[int, typer.Option(help="seed of the first program; the seeds count up from it")] = 0,
    only: Annotated[bool, typer.Option("--only", help="run the program of --seed alone, with its whole error")] = False,
    minutes: Annotated[float | None, typer.Option(help="time after which no program is begun (default: none)")] = None,
    traits: Annotated[str, typer.Option(help="names of traits, separated by ';'; with --only, all of its traits")] = "",
    plan: Annotated[str, typer.Option(help="plan of all programs in place of the drawn ones")] = "",
    plant: Annotated[str, typer.Option(help=f"fault to plant, to see it found: {'; '.join(PLANTS)}")] = "",
    lanes: Annotated[int, typer.Option(min=1, help="number of programs that run at the same time")] = 2,
    verbose: Annotated[bool, typer.Option(help="print every program, instead of only the faults")] = False,
) -> None:
    """Draw programs and plans, run each program with and without its plan, and compare all resulting numbers.

    A program must be equal to one process, or end with an error of Meshwright that says what to change; where nothing
    can know that a program is wrong, a warning is enough. Exits with status 1 if a program is silently different, ends
    with another error, hangs, is refused without need, or was not compared.

    Examples:

        python -m conformance.random_programs
        python -m conformance.random_programs --seed 137 --only
        python -m conformance.random_programs --only --traits "shared mlp; padded right" --plan "tp2+sp"
        python -m conformance.random_programs --traits "rope dynamic" --count 50
    """
    warnings.filterwarnings("ignore")
    _check(plan, PLANS, "--plan")
    _check(plant, PLANTS, "--plant")
    asked = [name.strip() for name in traits.split(";") if name.strip()]
    for name in asked:
        _check(name, TRAITS, "--traits")
    if only:
        drawn = Program.drawn(seed)
        names = tuple(sorted(asked)) if asked else drawn.names
        programs: Iterator[Program] = iter([Program(seed=seed, plan=plan or drawn.plan, names=names)])
        count = 1
    else:
        programs = itertools.islice(_matching(seed, set(asked), plan), count)
    found = judged(
        programs,
        lanes=1 if only else lanes,
        seconds=None if minutes is None else minutes * 60,
        plant=plant or None,
    )
    start = time.perf_counter()
    outcomes: list[Outcome] = []
    for outcome in track(found, "programs", total=count, disable=not sys.stderr.isatty()):
        outcomes.append(outcome)
        if verbose or only or outcome.is_fault:
            print(f"{outcome.verdict}: {outcome.program}\n    {outcome.why}", flush=True)
        if only and outcome.details:
            print(outcome.details)
    if not only:
        print(table(outcomes))
    print(f"{len(outcomes)} programs from seed {seed}: {counts(outcomes)}; {time.perf_counter() - start:.0f} s")
    # A run that compared nothing has shown nothing.
    raise typer.Exit(1 if not outcomes or any(outcome.is_fault for outcome in outcomes) else 0)


def _matching(seed: int, asked: set[str], plan: str) -> Iterator[Program]:
    for number in itertools.count(seed):
        program = Program.drawn(number)
        if not asked or asked & set(program.names):
            yield Program(seed=number, plan=plan or program.plan, names=program.names)


def _check(name: str, known: Collection[str], option: str) -> None:
    if name and name not in known:
        raise typer.BadParameter(f"{name!r} is none of: {'; '.join(known)}", param_hint=option)


if __name__ == "__main__":
    typer.run(main)
