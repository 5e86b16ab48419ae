"""A preempted job saves on all ranks and ends with exit code 75; started again, it ends as an undisturbed one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from conformance.clusters import local_cluster, why_not
from harness.launchers import Ended, run_command
from meshwright.choose.given_plan import PLAN_VARIABLE
from support.preempted_script import trained
from support.preemptions import PLAN, SCRIPT, SlurmJob
from support.tiers import crossing, nightly
from support.trainers import fresh_accelerate

STEPS = 16


@pytest.fixture(autouse=True)
def preloaded_ranks(preloaded_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHON_EXEC", str(preloaded_python))


def undisturbed(kind: str, plan: str, folder: Path, steps: int) -> str:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    with pytest.MonkeyPatch.context() as patch, fresh_accelerate():
        patch.setenv(PLAN_VARIABLE, plan)
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setattr("meshwright.faults.preemption._heard", {})
        digest = trained(kind, folder, steps, lambda _: None)
    for number, handler in before.items():
        signal.signal(number, handler)
    return digest


def launched(kind: str, plan: str, folder: Path, interrupts: list[Any]) -> Ended:
    options = ["--cpu", "--plan", plan, "--max-restarts", "2", "--job_id", "one"]
    return run_command("launch", *options, str(SCRIPT), kind, str(folder), str(STEPS), folder=folder,
                       interrupts=interrupts, timeout=300)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "plan", "number"),
    [
        ("loop", "dp2", signal.SIGUSR1),
        nightly("trainer", "dp2 zero3", signal.SIGTERM),
        nightly("trainer", "tp2", signal.SIGUSR1),
        crossing("accelerate", "tp2+sp", signal.SIGTERM),
    ],
)
def test_a_job_that_is_preempted_goes_on_when_it_is_started_again(
    kind: str, plan: str, number: signal.Signals, pool2: Any, tmp_path: Path
) -> None:
    """Bitwise. The launcher does not restart by itself what has ended for the scheduler to start it again."""
    job, whole = tmp_path / "job", tmp_path / "whole"
    job.mkdir()
    whole.mkdir()

    def trains() -> bool:
        progress = job / "progress"
        return progress.exists() and progress.read_text().count("\n") >= 3

    first = launched(kind, plan, job, [(number, trains)])
    assert first.code == 75, first.output
    assert f"preempted by {number.name} to rank " in first.output
    assert "job one is preempted, and goes on when it is started again" in first.output
    assert "start again (restart" not in first.output and not (job / "result").exists()
    second = launched(kind, plan, job, [])
    assert second.code == 0, second.output
    assert (job / "progress").read_text().count("\n") < STEPS + 3
    assert (job / "result").read_text() == pool2.run(undisturbed, kind, plan, whole, STEPS, timeout=200)[0]


def test_a_script_that_does_not_save_is_not_said_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import time\nfrom pathlib import Path\nimport torch\nPath('started').write_text('')\ntime.sleep(60)\n"
    )
    options = ["--cpu", "--num_processes", "2", "--max-restarts", "2", "--job_id", "one", "train.py"]
    started = tmp_path / "started"
    ended = run_command("launch", *options, folder=tmp_path, interrupts=[(signal.SIGTERM, started.exists)])
    assert ended.code == 143, ended.output
    assert "was killed by SIGTERM" in ended.output and "goes on when" not in ended.output


@pytest.mark.skipif("MESHWRIGHT_CLUSTERS" not in os.environ, reason="takes minutes; `make clusters` runs ten")
@pytest.mark.timeout(900)
@pytest.mark.crossing
@pytest.mark.parametrize("scheduler", ["slurm", "ray"])
def test_a_job_on_a_real_cluster_of_two_nodes(scheduler: str, pool4: Any, tmp_path: Path) -> None:
    """Started by the file that ``meshwright plan --emit`` prints; bitwise."""
    if why := why_not(scheduler):
        pytest.skip(why)
    with local_cluster(scheduler, tmp_path) as start:
        job = start(tmp_path / "job")
        assert job.train_on(3), job.log
        job.announce_end() if isinstance(job, SlurmJob) else job.signal_rank(1, signal.SIGUSR1)
        result = job.finish()
    assert job.repeats_little and "preempted" in job.log, job.log
    (tmp_path / "whole").mkdir()
    assert result == pool4.run(undisturbed, "loop", PLAN, tmp_path / "whole", job.steps, timeout=200)[0], job.log
