"""A Slurm cluster on this machine: a controller, and several nodes, each a slurmd of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare")

# Nodes do not run on hosts of their own, so nothing is bound to cores or kept in control groups.
_CONFIGURATION = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/linear
MpiDefault=none
MailProg=/bin/true
JobRequeue=1
ReturnToService=2
KillWait=30
SlurmdTimeout=60
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,defer_batch
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str | None:
    """Return why this machine cannot have a Slurm cluster; None if it can."""
    missing = [name for name in PROGRAMS if _program(name) is None]
    if missing:
        return f"a local Slurm needs {', '.join(missing)}; make slurm installs them"
    if os.geteuid() != 0:
        return "the daemons of a local Slurm need root"
    is_permitted = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
    return None if is_permitted else "the nodes of a local Slurm need mount namespaces, which are not permitted here"


@dataclass(frozen=True)
class Slurm:
    """A running cluster.

    Args:
        folder: of its configuration, state and logs.
        nodes: their names.
    """

    folder: Path
    nodes: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its commands."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        """Run one of its commands and return what it prints."""
        done = subprocess.run(
            command, env={**self.environment, **environment}, cwd=cwd, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return (done.stdout + done.stderr).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm knows of a job."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextlib.contextmanager
def local_slurm(folder: Path, nodes: int = 2) -> Iterator[Slurm]:
    """Start a cluster, and end it with all of its jobs.

    Args:
        folder: an empty folder.
        nodes: the number of nodes.
    """
    slurm = Slurm(folder, tuple(f"node{number}" for number in range(1, nodes + 1)))
    ports = _free_ports(nodes + 1)
    listed = [
        f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN"
        for name, port in zip(slurm.nodes, ports[1:], strict=True)
    ]
    text = _CONFIGURATION.format(host=socket.gethostname(), ports=ports, folder=folder, nodes="\n".join(listed))
    for name in ("state", *(f"spool-{node}" for node in slurm.nodes)):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(text)
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + f"\n127.0.0.1 {' '.join(slurm.nodes)}\n")
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    paths = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    # The names of the nodes lead somewhere in the mount namespace of the daemons, and so of their jobs.
    named = ["unshare", "--mount", "sh", "-c", f'mount --bind {folder}/hosts /etc/hosts && exec "$@"', "sh"]
    commands = [["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *paths]]
    commands.append([*named, _found("slurmctld"), "-D", "-c"])
    commands += [[*named, _found("slurmd"), "-D", "-N", node] for node in slurm.nodes]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"daemon-{len(daemons)}.log").open("wb") as log:
                command[0] = _found(command[0])
                daemons.append(subprocess.Popen(command, env=slurm.environment, stdout=log, stderr=log))
            _wait_for_socket(folder / "munge.socket")
        _wait_for_nodes(slurm)
        yield slurm
    finally:
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            slurm.call("scancel", "--full", "--signal=KILL", "--state=RUNNING", "--user=root")
            slurm.call("scancel", "--user=root")
            _wait_for_no_jobs(slurm)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _found(name: str) -> str:
    path = _program(name)
    assert path is not None, name
    return path


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _wait_for_socket(path: Path, patience: float = 20.0) -> None:
    end = time.monotonic() + patience
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"munged made no {path}: {(path.parent / 'munge.log').read_text()}")
        time.sleep(0.05)


def _wait_for_nodes(slurm: Slurm, patience: float = 60.0) -> None:
    end, seen = time.monotonic() + patience, ""
    while time.monotonic() < end:
        with contextlib.suppress(RuntimeError):
            seen = slurm.call("sinfo", "--noheader", "--Node", "--format=%N %T")
            if seen.count(" idle") == len(slurm.nodes) and "*" not in seen:
                return
        time.sleep(0.2)
    logs = "".join(f"\n{path.name}: {path.read_text()[-2000:]}" for path in sorted(slurm.folder.glob("*.log")))
    raise TimeoutError(f"the nodes of the local Slurm did not come: {seen}{logs}")


def _wait_for_no_jobs(slurm: Slurm, patience: float = 40.0) -> None:
    end = time.monotonic() + patience
    while slurm.call("squeue", "--noheader") and time.monotonic() < end:
        time.sleep(0.2)
