"""Runs whose ranks are really killed or stopped, under the launchers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.choose.plan_file import PLAN_VARIABLE
from support.killed_script import trained
from support.restarts import Ended, Run, disturbed, stopped
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


@pytest.mark.parametrize("name", RUNS)
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


@pytest.mark.parametrize("by_torchrun", [False, True], ids=["meshwright launch", "torchrun"])
def test_a_stopped_rank_ends_the_job_and_is_named(by_torchrun: bool, tmp_path: Path) -> None:
    run = Run(kind="loop", plan="dp2 zero1", steps=10_000, timeout=4.0)
    ended: Ended = stopped(run, tmp_path, 1, by_torchrun=by_torchrun)
    assert ended.code == (1 if by_torchrun else 137), ended.output
    assert ended.after < run.timeout + 5
    assert re.search(r"meshwright: rank 1 \(host [^)]*\): stopped, hung or cut off", ended.output), ended.output
    assert by_torchrun or "meshwright launch: rank 1 was killed by SIGKILL" in ended.output
