"""Runs whose ranks are really killed or stopped, under the launchers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.choose.given_plan import PLAN_VARIABLE
from support.killed_script import trained
from support.restarts import Run, disturbed
from support.tiers import crossings
from support.trainers import fresh_accelerate

STEPS = 12
RUNS = {
    "loop, dp2+zero1": Run(kind="loop", plan="dp2 zero1", steps=STEPS),
    "loop, tp2+sp": Run(kind="loop", plan="tp2+sp", steps=STEPS),
    "trainer, dp2+zero3": Run(kind="trainer", plan="dp2 zero3", steps=STEPS),
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def undisturbed(run: Run, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch, fresh_accelerate():
        patch.setenv(PLAN_VARIABLE, run.plan)
        return trained(run.kind, folder, run.steps, run.timeout)


@pytest.mark.parametrize("name", crossings(RUNS, but=["loop, dp2+zero1"], one_in=2))
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(
    name: str, pool2: Any, tmp_path: Path, preloaded_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise; the program has nothing for restarts but the line that loads its newest checkpoint, or the Trainer."""
    run = RUNS[name]
    monkeypatch.setenv("PYTHON_EXEC", str(preloaded_python))
    ended = disturbed(run, tmp_path / "killed", kills=1, seed=1)
    assert ended.code == 0 and ended.faults, ended.output
    assert "was killed by SIGKILL; the processes of this machine start again (restart 1 of 1)" in ended.output
    (tmp_path / "whole").mkdir()
    assert ended.result == pool2.run(undisturbed, run, tmp_path / "whole", timeout=200)[0]
