"""The examples of a training script: the numbers of one process, and a run that is taken up by another plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from examples import finetune_lora, plain_loop
from harness.programs import run_program

ROOT = Path(__file__).parents[2]


def losses(program: Any, world_size: int, *args: Any) -> list[float]:
    outcomes = run_program(program, world_size, *args, timeout=240)
    assert all(outcome.code == 0 for outcome in outcomes), outcomes
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", outcomes[0].output)]


def test_a_plain_loop_goes_on_under_another_plan(tmp_path: Path) -> None:
    whole = losses(plain_loop.main, 1, 20, tmp_path / "one")
    parts = losses(plain_loop.main, 2, 10, tmp_path / "two") + losses(plain_loop.main, 1, 20, tmp_path / "two")
    # float32 and 20 steps: sums in another order differ by about 1e-6; the print has 4 digits. Without the state of
    # the optimizer or of the loader the second half would be off by more than 0.01.
    assert len(whole) == 2 and whole[1] < whole[0] < 5.55
    assert parts == pytest.approx(whole, abs=3e-4)


def test_adapters_are_tuned_over_two_processes(tmp_path: Path) -> None:
    outcomes = run_program(finetune_lora.main, 2, 40, tmp_path, timeout=240)
    assert all(outcome.code == 0 for outcome in outcomes), outcomes
    found = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", outcomes[0].output)]
    assert found[-1] < found[0] / 2
    assert "5 6 7 8 9 10 -> 11" in outcomes[0].output
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    assert not list(tmp_path.glob("model*.safetensors"))


@pytest.mark.parametrize("name", ["plain_loop", "finetune_lora"])
def test_examples_are_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 80
