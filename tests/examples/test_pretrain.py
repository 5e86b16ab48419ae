"""The pretraining example: a run that is killed goes on under another plan, on the same rows."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from examples.pretrain import prepare, train
from harness.programs import Outcome, run_program
from meshwright.choose.given_plan import PLAN_VARIABLE, plan_line

TEXT = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    assert prepare.prepare([TEXT], folder, 512, 4) == "29 paragraphs in 4 shards, 4 held out"
    return folder


def pretrain(data: Path, folder: Path, plan: dict[str, Any], killed_after: int = 0) -> None:
    """Train until step 20, or until rank 1 kills itself in a step."""
    os.environ[PLAN_VARIABLE] = plan_line(plan)
    clip, calls = mw.clip_grad_norm_, 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == killed_after and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return clip(*args)

    mw.clip_grad_norm_ = counted  # the process is this program's own
    train.main(data, folder, steps=20, every=10)


def losses(outcomes: list[Outcome]) -> dict[int, list[float]]:
    lines = re.findall(r"step (\d+): loss ([\d.]+), validation ([\d.]+)", outcomes[0].output)
    return {int(step): [float(loss), float(validation)] for step, loss, validation in lines}


@pytest.mark.crossing
def test_a_killed_run_goes_on_under_another_plan(data: Path, tmp_path: Path) -> None:
    whole = losses(run_program(pretrain, 1, data, tmp_path / "one", {}, timeout=240))
    assert whole.keys() == {10, 20}
    assert whole[20][1] < whole[10][1] < 6.2  # ln(512) = 6.24

    killed = run_program(pretrain, 2, data, tmp_path / "two", {"tp": 2, "sequence_parallel": True}, 14, timeout=240)
    assert killed[1].code == -signal.SIGKILL and killed[0].code not in (0, None)
    assert losses(killed).keys() == {10}

    ended = run_program(pretrain, 2, data, tmp_path / "two", {"dp": 2, "zero_stage": 1}, timeout=240)
    assert [outcome.code for outcome in ended] == [0, 0], ended
    assert "goes on after step 10" in ended[0].output
    # float32 and 20 steps: sums in another order differ by about 1e-6, and 4 digits are printed. Rows that are read
    # twice or left out, a schedule that starts anew or moments that are lost differ by more than 0.01.
    assert losses(ended)[20] == pytest.approx(whole[20], abs=3e-4)
    assert losses(killed)[10] == pytest.approx(whole[10], abs=3e-4)
    assert (tmp_path / "two" / "model" / "tokenizer.json").exists()


def test_too_little_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("one\n\ntwo\n")
    with pytest.raises(SystemExit, match="2 paragraphs are too few to train on: name more text files"):
        prepare.prepare([tmp_path / "short.txt"], tmp_path / "text", 512, 4)
