"""``make demo``'s own program, small, through the real launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.demo.prove import gradient_differences
from meshwright_tools.checkpoints.inspect_checkpoint import inspect_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT = 240  # seconds; about 20 on a free machine


def run_demo(python: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHON_EXEC"] = str(python)  # of the ranks alone: the proof checks that its process has no plugin
    command = [sys.executable, "-m", "examples.demo", *flags]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIME_LIMIT)
        except BaseException:
            process.terminate()  # not kill: it ends its own processes first
            raise
    return subprocess.CompletedProcess(command, process.returncode, output)


@pytest.mark.crossing
def test_the_demo_trains_and_proves_itself(tmp_path: Path) -> None:
    # Each rank is a Python of its own, with its own order of sets and its own imports, as for users.
    done = run_demo(Path(sys.executable), "--quick", "--dp", "2", "--tp", "2", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout

    summary = json.loads((tmp_path / "summary.json").read_text())
    given = {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1}
    assert {name: summary["plan"][name] for name in given} == given
    assert summary["world_size"] == 4
    assert summary["last_loss"] < summary["first_loss"]
    assert summary["tokens_per_s"] > 0
    # One float32 sum in another order differs by about 1e-7 (6e-8 is the unit roundoff).
    assert summary["parity"]["max_rel_loss_diff"] <= 1e-5
    # Before the first update gradients differ by at most 1e-6. After it by more, since Adam divides small
    # gradients by their own size, and torch's float32 norm, by which one process clips, is itself off by
    # 1e-5 to 1e-4: 4e-6 was measured here. A gradient that is summed wrongly is off by 1e-1 and more.
    assert summary["parity"]["max_rel_grad_diff"] <= 1e-4
    # Norms are whole on every rank, everything else is halved by tp=2, and Adam's two moments by dp=2.
    assert summary["optimizer_bytes_per_rank"] == pytest.approx(summary["param_bytes_per_rank"], rel=0.02)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "gradients").exists()
    held = inspect_checkpoint(tmp_path / "checkpoint")
    assert not held.damages and held.manifest is not None and held.manifest.step == summary["steps"]


@pytest.mark.nightly
def test_the_planner_picks_the_demo_s_plan(preloaded_python: Path, tmp_path: Path) -> None:
    done = run_demo(preloaded_python, "--quick", "--processes", "2", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["planned_by"] == "the planner" and summary["plan"]["dp"] * summary["plan"]["tp"] == 2
    assert "picked dp" in done.stdout and "estimated" in done.stdout
    assert summary["parity"]["max_rel_grad_diff"] <= 1e-4  # as above


@pytest.mark.nightly
def test_a_plan_that_does_not_fit_is_one_clear_message(preloaded_python: Path, tmp_path: Path) -> None:
    done = run_demo(preloaded_python, "--quick", "--dp", "1", "--tp", "3", "--output", str(tmp_path))
    assert done.returncode == 1
    assert "tp must be one of 1, 2, 4, 8" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "summary.json").exists()


def test_the_proof_sees_a_gradient_that_is_a_little_wrong() -> None:
    expected = {"weight": torch.tensor([0.5, -2.0]), "bias": torch.tensor([1.0])}
    found = {"weight": torch.tensor([0.5, -2.0]), "bias": torch.tensor([1.001])}
    differences = gradient_differences(found, expected)
    assert differences["weight"] == 0
    assert differences["bias"] == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(ValueError, match="bias"):
        gradient_differences({"weight": found["weight"]}, expected)
