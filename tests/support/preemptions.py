"""Runs on a local Slurm or Ray whose processes are killed, or that are preempted, until they end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.slurm import Slurm

SCRIPT = Path(__file__).with_name("preempted_script.py")
NODES, PER_NODE = 2, 2
PLAN = "dp2 tp2"
CONFIG = """{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32,
"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "torch_dtype": "float32"}"""
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def emitted(folder: Path, scheduler: str) -> str:
    """Return the file that ``meshwright plan`` prints for the plan on CPUs."""
    (folder / "config.json").write_text(CONFIG)
    command = [
        sys.executable, "-m", "meshwright_tools.cli", "plan", "weigh", "--model", str(folder / "config.json"),
        "--gpu", "cpu", "--gpus", str(NODES * PER_NODE), "--gpus-per-node", str(PER_NODE), "--seq-len", "12",
        "--global-batch", "4", "--plan", PLAN, "--emit", scheduler,
    ]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment()).stdout


def environment() -> dict[str, str]:
    """The environment of the jobs: this checkout's modules and commands."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }


@dataclass(frozen=True, kw_only=True)
class Disturbed:
    """A job that is disturbed.

    Args:
        folder: of the job.
        kind: of the program: ``"loop"`` or ``"trainer"``.
        steps: that it trains.
        patience: seconds that the job may be silent: without a step and without a line in its log.
        disturbances: what was done to it, in words.
    """

    folder: Path
    kind: str = "loop"
    steps: int = 24
    patience: float = 500.0
    disturbances: list[str] = field(default_factory=list)

    @property
    def log(self) -> str:
        return self._read("job.log")

    @property
    def progress(self) -> int:
        return self._read("progress").count("\n")

    @property
    def result(self) -> str | None:
        """The digest of the weights; None if the job has not come to its end."""
        return self._read("result") or None

    @property
    def repeats_little(self) -> bool:
        """Whether the job went on each time: a kill costs the steps since the last checkpoint, a preemption none."""
        return self.progress <= self.steps + 8

    def is_over(self) -> bool:
        raise NotImplementedError

    def stop(self) -> None:
        """End the job, so that another one has the nodes."""
        raise NotImplementedError

    def keep_going(self) -> None:
        """Do what an operator might do while a job waits."""

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds or the job is over; return whether the condition holds.

        A busy machine may be slow, but a job that is alive says something: each line and each step begins the patience
        anew.

        Raises:
            TimeoutError: the job is silent. The error has what its processes do, and the log.
        """
        said, since = "", time.monotonic()
        while not condition():
            if self.is_over():
                return condition()
            self.keep_going()
            if (now := self.log + self._read("progress")) != said:
                said, since = now, time.monotonic()
            if (silent := time.monotonic() - since) > self.patience:
                load = os.getloadavg()[0]
                raise TimeoutError(
                    f"the job is silent for {silent:.0f} s after {self.progress} steps, at a load of {load:.0f}; "
                    f"{self.alive()}\n{self.log}"
                )
            time.sleep(0.2)
        return True

    def alive(self) -> str:
        """Return in words which of the last ranks' processes are alive."""
        states = []
        for path in sorted(self.folder.glob("pid-*")):
            own = path.read_text().split()[0]
            states.append(f"{path.name[4:]} {'alive' if Path('/proc', own).exists() else 'gone'}")
        return f"ranks: {', '.join(states) or 'none has started'}"

    def train_on(self, steps: int) -> bool:
        """Wait for more steps; return whether they came."""
        goal = self.progress + steps
        return self.wait(lambda: self.progress >= goal)

    def finish(self) -> str | None:
        """Wait for the end of the job; return the digest of the weights, or None if there is none."""
        self.wait(self.is_over)
        return self.result

    def kill(self, rank: int, *, launcher: bool = False) -> None:
        """Kill a rank, or the launcher of its node, as a node's out-of-memory killer does."""
        own, parent = (int(word) for word in self._read(f"pid-{rank}").split())
        os.kill(parent if launcher else own, signal.SIGKILL)
        self.disturbances.append(f"SIGKILL of {'the launcher of ' * launcher}rank {rank}")

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send one rank alone the signal that announces the end of the job."""
        os.kill(int(self._read(f"pid-{rank}").split()[0]), number)
        self.disturbances.append(f"{number.name} to rank {rank}")

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


@dataclass(frozen=True, kw_only=True)
class SlurmJob(Disturbed):
    """A job of one launcher on each node of a Slurm.

    Args:
        slurm: the cluster.
        number: of the job.
    """

    slurm: Slurm
    number: str

    @classmethod
    def submit(cls, slurm: Slurm, batch: Path, folder: Path, *options: str, kind: str = "loop") -> SlurmJob:
        """Submit a batch file that ``meshwright plan --emit slurm`` printed."""
        folder.mkdir(parents=True)
        arguments = [str(batch), str(SCRIPT), kind, str(folder), str(cls.steps)]
        number = slurm.call("sbatch", "--parsable", f"--output={folder}/job.log", *options, *arguments, cwd=folder,
                            **environment())  # fmt: skip
        return cls(slurm=slurm, number=number, folder=folder, kind=kind)

    def is_over(self) -> bool:
        return self.slurm.job(self.number)["JobState"] in _OVER

    def stop(self) -> None:
        self.slurm.call("scancel", self.number)

    def keep_going(self) -> None:
        """Start a job that Slurm has queued again at once, not after the two minutes that Slurm would wait."""
        state = self.slurm.job(self.number)
        if state["JobState"] == "PENDING" and state["Reason"] == "BeginTime":
            with contextlib.suppress(RuntimeError):  # it has just begun
                self.slurm.call("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def announce_end(self) -> None:
        """Send what --signal=B:USR1@120 sends before the end of the job's time."""
        self.slurm.call("scancel", "--batch", "--signal=USR1", self.number)
        self.disturbances.append("SIGUSR1 to the batch script")

    def requeue(self) -> None:
        """Preempt the job as one of higher priority does under PreemptMode=REQUEUE: by SIGTERM, and into the queue."""
        self.slurm.call("scontrol", "requeue", self.number)
        self.disturbances.append("requeued by Slurm")


@contextlib.contextmanager
def ray_nodes() -> Iterator[Any]:
    """Start a Ray cluster of nodes on this machine."""
    from ray.cluster_utils import Cluster

    # Ray gives a process a minute to start, and again to join its workers, which is too short on a busy machine.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "180"}
    os.environ |= {"RAY_worker_register_timeout_seconds": "300"}
    cluster = Cluster(initialize_head=True, head_node_args=dict(_RAY_NODE, include_dashboard=False))
    try:
        for _ in range(1, NODES):
            cluster.add_node(**_RAY_NODE)
        yield cluster
    finally:
        cluster.shutdown()


_RAY_NODE = {"num_cpus": PER_NODE, "object_store_memory": 80_000_000}
_TRAIN = """\
def train():
    from pathlib import Path

    from support.preempted_script import main

    main({kind!r}, Path({folder!r}), {steps})
"""


@dataclass(frozen=True, kw_only=True)
class RayJob(Disturbed):
    """A job of Ray Train.

    Args:
        cluster: the nodes.
        driver: the process of the script.
    """

    cluster: Any
    driver: subprocess.Popen[bytes]

    @classmethod
    def start(cls, cluster: Any, script: str, folder: Path, kind: str = "loop") -> RayJob:
        """Start a script that ``meshwright plan --emit ray`` printed."""
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(_TRAIN.format(kind=kind, folder=str(folder), steps=cls.steps))
        (folder / "start.py").write_text(script)
        with (folder / "job.log").open("wb") as log:
            driver = subprocess.Popen(
                [sys.executable, "start.py", str(folder / "storage")], cwd=folder, stdout=log, stderr=log,
                env={**environment(), "RAY_ADDRESS": cluster.address},
            )  # fmt: skip
        return cls(cluster=cluster, driver=driver, folder=folder, kind=kind)

    def is_over(self) -> bool:
        return self.driver.poll() is not None

    def stop(self) -> None:
        self.driver.kill()
        self.driver.wait()

    def lose_node(self) -> None:
        """End a node that is not the head, with all of its processes, and start another one."""
        node = next(node for node in self.cluster.list_all_nodes() if node is not self.cluster.head_node)
        self.cluster.remove_node(node, allow_graceful=False)
        self.cluster.add_node(**_RAY_NODE)
        self.disturbances.append("a node is lost, and another one comes")
