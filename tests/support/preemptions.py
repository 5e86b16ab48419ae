"""Runs on a local Slurm whose processes are killed, or that are preempted, until they end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.slurm import Slurm

SCRIPT = Path(__file__).with_name("preempted_script.py")
PER_NODE = 2
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A job of one launcher on each node.

    Args:
        slurm: the cluster.
        batch: the file that ``meshwright plan --emit slurm`` printed.
        folder: of the run.
        kind: of the program: ``"loop"`` or ``"trainer"``.
        steps: that it trains.
        patience: seconds that the run may take.
        disturbances: that were made, in words.
    """

    slurm: Slurm
    batch: Path
    folder: Path
    kind: str = "loop"
    steps: int = 24
    patience: float = 900.0
    disturbances: list[str] = field(default_factory=list)

    def submit(self, *options: str) -> str:
        """Submit the job and return its number."""
        self.folder.mkdir(parents=True)
        arguments = [str(self.batch), str(SCRIPT), self.kind, str(self.folder), str(self.steps)]
        output = f"--output={self.folder}/job.log"
        return self.slurm.call("sbatch", "--parsable", output, *options, *arguments, cwd=self.folder)

    def finish(self, job: str) -> str | None:
        """Wait for the end of the job; return the digest of the weights, or None if there is none."""
        self.wait(job, lambda: self.slurm.job(job)["JobState"] in _OVER)
        result = self.folder / "result"
        return result.read_text() if result.exists() else None

    def wait(self, job: str, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds or the job is over; return whether the condition holds.

        A job that Slurm has queued again starts at once, not after the two minutes that Slurm would wait.
        """
        end = time.monotonic() + self.patience
        while not condition():
            state = self.slurm.job(job)
            if state["JobState"] in _OVER:
                return condition()
            if state["JobState"] == "PENDING" and state["Reason"] == "BeginTime":
                with contextlib.suppress(RuntimeError):  # it has just begun
                    self.slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")
            if time.monotonic() > end:
                raise TimeoutError(f"job {job} is {state['JobState']} ({state['Reason']}):\n{self.log}")
            time.sleep(0.2)
        return True

    @property
    def log(self) -> str:
        path = self.folder / "job.log"
        return path.read_text() if path.exists() else ""

    @property
    def progress(self) -> int:
        path = self.folder / "progress"
        return path.read_text().count("\n") if path.exists() else 0

    def train_on(self, job: str, steps: int) -> bool:
        """Wait for more steps; return whether they came."""
        goal = self.progress + steps
        return self.wait(job, lambda: self.progress >= goal)

    def kill(self, rank: int, *, launcher: bool = False) -> None:
        """Kill a rank, or the launcher of its node, as a node's out-of-memory killer does."""
        own, parent = (int(word) for word in (self.folder / f"pid-{rank}").read_text().split())
        os.kill(parent if launcher else own, signal.SIGKILL)
        self.disturbances.append(f"SIGKILL of {'the launcher of ' * launcher}rank {rank}")

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send one rank alone the signal that announces the end of the job."""
        os.kill(int((self.folder / f"pid-{rank}").read_text().split()[0]), number)
        self.disturbances.append(f"{number.name} to rank {rank}")

    def announce_end(self, job: str) -> None:
        """Send what --signal=B:USR1@120 sends before the end of the job's time."""
        self.slurm.call("scancel", "--batch", "--signal=USR1", job)
        self.disturbances.append("SIGUSR1 to the batch script")

    def requeue(self, job: str) -> None:
        """Preempt the job as one of higher priority does under PreemptMode=REQUEUE: by SIGTERM, and into the queue."""
        self.slurm.call("scontrol", "requeue", job)
        self.disturbances.append("requeued by Slurm")
