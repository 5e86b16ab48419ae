"""What ``python -m benchmarks`` makes of measured steps: intervals, pairs, tables, and the rest of an ended run."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import __main__ as command
from benchmarks import race
from benchmarks.contenders import CONTESTS, ONE_PROCESS, OURS_TP, STOCK_TP, Contender, Entry
from benchmarks.report import compared, print_time
from benchmarks.rounds import Comparison, Round, Standing, Step, Turn
from benchmarks.summary import Ratio, interval
from benchmarks.teams import ContenderFailedError, Team
from benchmarks.workload import Workload

TURN = Turn(began=10, ended=12, user=1.5, kernel=0.25, waited=0.1, clip=0.02, clip_cpu=0.01, loss=5.0, norm=2.0)
STEP = Step(wall=2, user=3, kernel=1, waited=0.5, clip=0.02, clip_cpu=0.04)


@pytest.mark.parametrize(("count", "ends"), [(1, (1, 1)), (5, (1, 5)), (6, (1, 6)), (9, (2, 8)), (20, (6, 15))])
def test_interval(count: int, ends: tuple[int, int]) -> None:
    """The ranks of the ends, as in tables of the sign test."""
    assert interval(range(count, 0, -1)) == ends


@pytest.mark.parametrize("count", range(6, 100))
def test_interval_is_the_narrowest_with_its_confidence(count: int) -> None:
    low, _ = interval(range(1, count + 1))

    def missed(skipped: int) -> float:
        """The probability that the median is below the value after ``skipped`` ones, or above its mirror image."""
        return 2 * sum(comb(count, below) for below in range(skipped)) / 2**count

    assert missed(int(low)) <= 0.05 < missed(int(low) + 1)


def test_a_paired_ratio_does_not_see_load_that_both_sides_share() -> None:
    load = [1.0, 7.0, 1.5, 30.0, 2.0, 1.1, 4.0]
    assert Ratio.paired([0.5 * x for x in load], load) == Ratio(median=0.5, low=0.5, high=0.5)
    with pytest.raises(ValueError, match="shorter"):
        Ratio.paired(load, load[1:])


def test_a_step_lasts_from_the_first_start_to_the_last_end_on_any_rank() -> None:
    late = replace(TURN, began=11, ended=15, clip=0.5, waited=0.3)
    step = Step.of_ranks([TURN, late])
    assert step == Step(wall=5, user=3.0, kernel=0.5, waited=0.4, clip=0.02, clip_cpu=0.02)
    assert step.cpu == 3.5


def test_a_step_of_which_a_rank_lacks_a_figure_lacks_it() -> None:
    step = Step.of_ranks([TURN, replace(TURN, waited=None, clip=None)])
    assert (step.waited, step.clip) == (None, None)


def rounds_of(*walls: dict[str, float]) -> list[Round]:
    """Rounds in which the given contenders took so long, with a CPU time of 4."""
    return [
        Round(order=list(one), load_average=1.0, steps={name: replace(STEP, wall=wall) for name, wall in one.items()})
        for one in walls
    ]


def test_a_comparison_takes_the_rounds_that_have_both() -> None:
    rounds = rounds_of({"a": 1, "b": 2}, {"b": 9, "a": 3}, {"a": 50})  # the last one was interrupted
    found = Comparison.within(rounds, "a", "b")
    assert found is not None
    assert (found.rounds, found.wall, found.cpu.median) == (2, Ratio.of([1 / 2, 1 / 3]), 1.0)
    assert Comparison.within(rounds, "a", "c") is None


def test_the_share_of_a_clip_is_taken_within_its_step() -> None:
    found = Standing.within(rounds_of({"a": 1}, {"a": 2}, {"a": 4}), "a")
    assert found is not None and found.clip is not None and found.clip_cpu is not None
    assert (found.wall, found.clip.median, found.clip.high, found.clip_cpu.median) == (2, 0.01, 0.02, 0.01)
    assert Standing.within([], "a") is None


def test_compared_without_ours(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = rounds_of({ONE_PROCESS: 1, STOCK_TP: 2})
    assert [(x.base, x.other) for x in compared(rounds, [ONE_PROCESS, STOCK_TP])] == [(ONE_PROCESS, STOCK_TP)]
    print_time("tp", rounds, [entry for entry in CONTESTS["tp"] if entry.name in (ONE_PROCESS, STOCK_TP)], [])
    assert f"{ONE_PROCESS} only |" in capsys.readouterr().out


@pytest.mark.parametrize(("last", "verdict"), [(0.60, "met"), (0.61, "missed")])
def test_a_goal_is_held_against_the_upper_end(last: float, verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    walls = [0.5] * 5 + [last]  # of six, the interval has all; the median is 0.5
    rounds = rounds_of(*({OURS_TP: wall, STOCK_TP: 1.0} for wall in walls))
    rounds[0].steps[STOCK_TP] = replace(STEP, wall=1.0, clip=None)
    entries = [entry for entry in CONTESTS["tp"] if entry.name in (OURS_TP, STOCK_TP)]
    print_time("tp", rounds, entries, ["absent library"])
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if f"{OURS_TP} / {STOCK_TP}" in line]
    assert f"0.500 (0.500-{last:.3f})" in row
    assert f"| <= 0.60, {verdict} |" in " ".join(row.split()) and row.rstrip().endswith("ours only |")
    (row,) = [line for line in printed.splitlines() if "absent library" in line]
    assert "not installed" in row


def test_fewer_than_six_rounds_have_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    entries = [entry for entry in CONTESTS["tp"] if entry.name in (OURS_TP, ONE_PROCESS)]
    print_time("tp", rounds_of({OURS_TP: 1.0, ONE_PROCESS: 2.0}), entries, [])
    assert "1 (min-max)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("turns", "error"),
    [
        ([TURN, TURN], None),
        ([replace(TURN, loss=4.0), replace(TURN, loss=6.0)], None),  # dp: each rank has the loss of its rows
        ([replace(TURN, norm=None)] * 2, None),  # the library does not say
        ([replace(TURN, loss=5.01)] * 2, "it: loss 5.010000 in step 1, not 5.000000"),
        ([TURN, replace(TURN, norm=2.1)], "it: gradient norm 2.100000 in step 1, not 2.000000"),
        ([replace(TURN, loss=float("nan"))] * 2, "loss nan"),
    ],
)
def test_wrong_numbers_are_not_timed(turns: list[Turn], error: str | None) -> None:
    steps, expected = [[TURN, TURN], turns], [[TURN], [TURN]]
    if error is None:
        race.check("it", steps, expected)
    else:
        with pytest.raises(race.WrongAnswerError, match=error):
            race.check("it", steps, expected)


class FakeTeam:
    """Answers without processes; ``fails_at`` is the number of the step, counted over all teams, at which it ends."""

    open: ClassVar[Counter[str]] = Counter()
    steps: ClassVar[list[str]] = []
    fails_at: int = -1
    failure: type[BaseException] = KeyboardInterrupt

    def __init__(self, entry: Entry, workload: Workload) -> None:
        self.name = entry.name
        FakeTeam.open[entry.name] += 1

    def step(self) -> list[Turn]:
        if len(FakeTeam.steps) == FakeTeam.fails_at:
            raise FakeTeam.failure
        FakeTeam.steps.append(self.name)
        return [TURN, TURN]

    def close(self) -> None:
        FakeTeam.open[self.name] -= 1


@pytest.fixture
def fake_teams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "Team", FakeTeam)
    monkeypatch.setattr(FakeTeam, "open", Counter())
    monkeypatch.setattr(FakeTeam, "steps", [])
    monkeypatch.setattr(os, "environ", dict(os.environ))


NAMES = [OURS_TP, STOCK_TP]
WARM_UP = 3 * race.WARM_UP_STEPS  # of the two and of one process


@pytest.mark.usefixtures("fake_teams")
def test_every_contender_takes_one_step_in_each_round_in_a_seeded_order() -> None:
    runs: list[list[Round]] = [[], []]
    for rounds in runs:
        race.race(CONTESTS["tp"], NAMES, Workload(), 20, rounds)
    assert runs[0] == runs[1] and len(runs[0]) == 20
    assert all(sorted(one.order) == sorted(NAMES) and list(one.steps) == one.order for one in runs[0])
    assert len({tuple(one.order) for one in runs[0]}) == 2
    assert FakeTeam.steps[WARM_UP : WARM_UP + 40] == [name for one in runs[0] for name in one.order]
    assert set(FakeTeam.open.values()) == {0}


@pytest.mark.usefixtures("fake_teams")
@pytest.mark.parametrize(("failure", "status"), [(KeyboardInterrupt, 130), (ContenderFailedError, 1)])
@pytest.mark.parametrize(("turns", "steps"), [(5, [2, 2, 1]), (0, [0]), (-2, [])])
def test_an_interrupted_run_reports_what_it_has(
    failure: Any, status: int, turns: int, steps: Sequence[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(FakeTeam, "fails_at", WARM_UP + turns)
    monkeypatch.setattr(FakeTeam, "failure", failure)
    written = tmp_path / "found.json"
    assert command.time_contests(["tp", "dp"], NAMES, 20, written) == status
    (record,) = json.loads(written.read_text())  # dp did not begin
    assert [len(one["steps"]) for one in record["rounds"]] == steps
    assert all(one["load_average"] >= 0 for one in record["rounds"])
    printed = capsys.readouterr()
    assert f"ended in round {len(steps)} of 20" in printed.err
    assert (f"{OURS_TP} / {STOCK_TP}" in printed.out) == (turns == 5)
    assert set(FakeTeam.open.values()) == {0}


@pytest.mark.usefixtures("fake_teams")
def test_a_contender_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It is checked and timed, without ratios and without the other contest."""
    written = tmp_path / "found.json"
    assert command.time_contests(["tp", "dp"], [OURS_TP], 2, written) == 0
    assert Counter(FakeTeam.steps) == {ONE_PROCESS: race.WARM_UP_STEPS, OURS_TP: race.WARM_UP_STEPS + 2}
    (record,) = json.loads(written.read_text())
    assert (record["contest"], record["comparisons"], len(record["rounds"])) == ("tp", [], 2)
    printed = capsys.readouterr().out
    assert "tp: step" in printed and "ratios" not in printed


def never(workload: Workload) -> Contender:
    raise ValueError(f"no model of {workload.hidden_size}")


def test_a_contender_that_fails_is_named() -> None:
    with pytest.raises(ContenderFailedError, match=r"(?s)it, rank 0: Traceback.*no model of 512"):
        Team(Entry(name="it", build=never, ranks=1), Workload())
