"""Defines and checks a launch: the script, the processes, the plan, and the addresses and ports of its machines."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import sys
import tempfile
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.choose.given_plan import PLAN_VARIABLE, launched_plan, plan_of_fields, plan_of_sizes, resolve_plan
from meshwright.errors import PlanError
from meshwright.plan.config import ParallelPlan
from meshwright.printable import printable_lines

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Raise if a port of this machine is not free; the check listens on the port briefly, on all addresses.

    Raises:
        PlanError: if the port is in use, or this user may not open it.
    """
    try:
        with socket.create_server(("", port)):
            return
    except PermissionError:
        reason = "may not be opened by this user; take one above 1023"
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        reason = "is in use by another program; take another, the same on every machine"
    raise PlanError(f"--main_process_port {port} {reason}")


def local_address_towards(address: str) -> str:
    """Return this machine's own address on the route to another address; nothing is sent.

    Raises:
        PlanError: if the name does not resolve, or there is no route to the address.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PlanError(f"--main_process_ip {address}: {error.strerror or error}; no route leads there") from None


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address; None if there is none."""
    import psutil  # accelerate depends on it

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return str(name)
    return None


LAUNCH_VARIABLE = "MESHWRIGHT_LAUNCH"  # the launch's name, the same in a restart
RESTARTED_VARIABLE = "MESHWRIGHT_RESTARTED"  # set in a restart, to the same name
JOB_VARIABLE = "MESHWRIGHT_JOB"  # the name that a scheduler gives the job, the same when it starts the job again
RESUME_VARIABLE = "MESHWRIGHT_RESUME"  # the checkpoint from which MeshwrightTrainer.train() goes on
START_TIMEOUT = 300  # seconds that machines wait for each other


def launch_name(job_id: str | None) -> str:
    """Return the name under which checkpoints know a launch: that of a scheduler's job, or a random one."""
    return uuid.uuid4().hex if job_id is None else uuid.uuid5(uuid.NAMESPACE_OID, job_id).hex


def job_environment(job_id: str) -> dict[str, str]:
    """Return the variables of a job that a scheduler starts again; each start may be a restart."""
    return {JOB_VARIABLE: job_id, **dict.fromkeys((LAUNCH_VARIABLE, RESTARTED_VARIABLE), launch_name(job_id))}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The settings of ``meshwright launch`` on this machine.

    Args:
        script: the path of a Python file or, with ``module``, the name of a module.
        arguments: the script's arguments.
        module: whether to run the script as ``python -m`` does.
        plan: the plan for ``to_distributed`` in the script; with None, ``to_distributed`` picks a plan.
        num_processes: the number of processes over all machines.
        num_machines: the number of machines; the command is run once on each machine.
        min_machines: the number of machines with which a restart may go on, if others are lost; by default all.
        max_restarts: how often the processes are started again after one of them has failed.
        machine_rank: this machine's number, from 0.
        main_process_ip: the address of machine 0; optional for one machine.
        main_process_port: the port on which machine 0 listens; by default any free port for one machine, else 29500.
        cpu: whether to run on CPU even if there are GPUs.
        mixed_precision: accelerate's precision ("no", "fp16", "bf16", "fp8"); None for the value in its configuration.
        start_timeout: seconds that machines wait for each other.
        resume: the checkpoint from which ``MeshwrightTrainer.train()`` goes on, unless it is told another.
        oversubscribe: whether to start more processes than this machine's CPU cores can serve.
        job_id: the name of a job that a scheduler starts again, the same each time.
        outlives: whether the launcher stays until the end of a single process, which would otherwise replace it.

    Raises:
        PlanError: if two numbers contradict each other (the message gives both), or the script does not exist.

    Example:
        >>> Launch(script="train", module=True, plan=ParallelPlan(dp=2, tp=2), num_processes=4).local_processes
        4
    """

    script: str
    arguments: Sequence[str] = field(default=())
    module: bool = False
    plan: ParallelPlan | None = None
    num_processes: int = 1
    num_machines: int = 1
    min_machines: int | None = None
    max_restarts: int = 0
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    cpu: bool = False
    mixed_precision: str | None = None
    start_timeout: int = START_TIMEOUT
    oversubscribe: bool = False
    resume: str | None = None
    job_id: str | None = None
    outlives: bool = False

    def __post_init__(self) -> None:
        for name in ("num_processes", "num_machines", "start_timeout"):
            if getattr(self, name) < 1:
                raise PlanError(f"--{name} {getattr(self, name)} must be at least 1")
        if self.job_id == "":
            raise PlanError(
                "--job_id is empty; give the scheduler's name of the job, the same each time that it starts the job"
            )
        if self.resume is not None and not Path(self.resume).is_dir():
            raise PlanError(f"--resume {self.resume}: there is no such folder; name a checkpoint of the Trainer")
        if self.max_restarts < 0:
            raise PlanError(f"--max-restarts {self.max_restarts} must not be negative")
        given = f"--num_machines {self.min_machines}:{self.num_machines}"
        if self.min_machines is not None and not 1 <= self.min_machines <= self.num_machines:
            raise PlanError(f"{given} must be MIN:MAX with 1 <= MIN <= MAX")
        if self.min_machines is not None and self.min_machines < self.num_machines and not self.max_restarts:
            raise PlanError(
                f"{given} lets the job go on with fewer machines after a restart, but there are no restarts; add "
                "--max-restarts 3, or write one number of machines"
            )
        if self.num_processes % self.num_machines:
            raise PlanError(
                f"--num_processes {self.num_processes} cannot be spread evenly over --num_machines "
                f"{self.num_machines}; it is the total number of processes over all machines"
            )
        if not 0 <= self.machine_rank < self.num_machines:
            raise PlanError(
                f"--machine_rank {self.machine_rank} must be from 0 to {self.num_machines - 1}, for --num_machines "
                f"{self.num_machines}"
            )
        if self.num_machines > 1 and self.main_process_ip is None:
            raise PlanError(
                f"--num_machines {self.num_machines} needs --main_process_ip: the address at which the other "
                "machines can reach machine 0"
            )
        if self.main_process_port is not None and not 0 < self.main_process_port < 2**16:
            raise PlanError(f"--main_process_port {self.main_process_port} must be from 1 to 65535")
        if self.plan is not None and self.plan.world_size != self.num_processes:
            raise PlanError(
                f"the plan {self.plan.product()} needs {self.plan.world_size} processes, but --num_processes is "
                f"{self.num_processes}; leave it out, or change the plan's sizes"
            )
        if self.module and (self.script.endswith(".py") or "/" in self.script):
            raise PlanError(f"-m takes the name of a module, such as my_package.train; for {self.script} leave -m out")
        if self.script.endswith(".ipynb"):
            raise PlanError(
                f"{self.script} is a notebook; start its code from a cell by accelerate's notebook_launcher, or make a "
                f"script of it: jupyter nbconvert --to script {self.script}"
            )
        if not self.module and not Path(self.script).is_file():
            hint = "; modules are started with -m" if not self.script.endswith(".py") else ""
            raise PlanError(f"there is no script {self.script}{hint}")

    @property
    def may_shrink(self) -> bool:
        """Whether a restart may go on with fewer machines, and then with another plan."""
        return self.min_machines is not None and self.min_machines < self.num_machines

    def names(self, word: bytes) -> bool:
        """Return whether the script's text has a word; True for modules, which may be anywhere."""
        try:
            return self.module or word in Path(self.script).read_bytes()
        except OSError:
            return True

    @property
    def local_processes(self) -> int:
        """The number of processes on this machine."""
        return self.num_processes // self.num_machines


def say(text: str) -> None:
    """Tell the user something about a launch."""
    print(f"meshwright launch: {printable_lines(text)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def note_of_processes(variable: str) -> Iterator[Path]:
    """Give the processes, which inherit this process's environment, a file to write to; yield its path."""
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        path = Path(folder, "note")
        os.environ[variable] = str(path)
        try:
            yield path
        finally:
            os.environ.pop(variable, None)


def script_and_arguments(script: str, arguments: Sequence[str]) -> tuple[str, list[str], bool]:
    """Return the script, its arguments and whether it is a module, of a command that may begin with ``python``.

    Raises:
        PlanError: if the command begins with another launcher.

    Example:
        >>> script_and_arguments("python", ["-u", "t.py", "--lr", "1"]), script_and_arguments("python3", ["-m", "a.b"])
        (('t.py', ['--lr', '1'], False), ('a.b', [], True))
    """
    name, rest = Path(script).name, list(arguments)
    if name in ("torchrun", "accelerate", "deepspeed", "mpirun", "srun") and not Path(script).is_file():
        raise _other_launcher(name)
    if name == "env" and rest and Path(script).suffix != ".py":  # "/usr/bin/env python t.py"
        return script_and_arguments(rest[0], rest[1:])
    if not re.fullmatch(r"python[\d.]*", name) or (not rest or Path(script).suffix == ".py"):
        return script, rest, False
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        del rest[: 2 if rest[0] in ("-W", "-X") else 1]
    is_module = rest[:1] == ["-m"]
    rest = rest[is_module:]
    if not rest or rest[0] == "-c":
        raise PlanError(
            f"{script} {' '.join(arguments)} names no script; write meshwright launch --num_processes N t.py"
        )
    if is_module and rest[0] in ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"):
        raise _other_launcher(rest[0])
    return rest[0], rest[1:], is_module


def _other_launcher(name: str) -> PlanError:
    return PlanError(
        f"meshwright launch starts the processes itself, in place of {name}; leave {name} and its options out: "
        "meshwright launch --num_processes N SCRIPT"
    )


def misplaced_options(script: str, arguments: Sequence[str], known: Collection[str]) -> str | None:
    """Return a sentence about options of the launcher that stand after a script whose text does not name them.

    Args:
        script: the path of the script.
        arguments: its arguments.
        known: the names of the launcher's options, with their dashes.
    """
    try:
        text = Path(script).read_text(errors="replace")
    except OSError:
        return None
    found: list[str] = []
    for index, argument in enumerate(arguments):
        name = argument.split("=")[0]
        if name in known and not re.search(rf"\b{re.escape(name.strip('-').replace('-', '_'))}\b", text):
            value = arguments[index + 1 : index + 2] if name == argument else []
            found += [argument, *(v for v in value if not v.startswith("-"))]
    if not found:
        return None
    own = " ".join(found)
    return (
        f"{own} stands after {script}, so the script gets it, but its text does not name it. If it is an option of the "
        f"launcher, write it before the script: meshwright launch {own} {script}"
    )


def parse_machines(text: str) -> tuple[int | None, int]:
    """Return the smallest number of machines, if one is given, and the number of machines.

    Args:
        text: the value of ``--num_machines``: ``N`` or ``MIN:MAX``.

    Raises:
        PlanError: if it is neither.

    Example:
        >>> parse_machines("4"), parse_machines("2:4")
        ((None, 4), (2, 4))
    """
    first, separator, second = text.partition(":")
    try:
        return (int(first), int(second)) if separator else (None, int(first))
    except ValueError:
        raise PlanError(f"--num_machines {text} must be a number of machines N, or MIN:MAX") from None


def find_plan(plan: str | Path | None, sizes: dict[str, Any], num_processes: int | None) -> ParallelPlan | None:
    """Return the plan of a launch, from ``plan``, ``sizes`` or the environment; None if none of them has a plan.

    Args:
        plan: a plan file, or a plan in words.
        sizes: the fields of ``ParallelPlan`` that the user passed.
        num_processes: the number of processes; if ``sizes`` lacks dp, dp is this number divided by the other sizes.

    Raises:
        PlanError: if both a plan and sizes are given, the processes are not divisible by the sizes, or ``plan`` is not
            a plan.
    """
    if plan is not None:
        if sizes:
            given = ", ".join(f"--{name} {value}" for name, value in sizes.items())
            raise PlanError(f"--plan {plan} and {given} both give the plan; leave one of them out")
        return resolve_plan(plan, "--plan")
    if not sizes:
        fields = launched_plan()
        return None if fields is None else plan_of_fields(fields, PLAN_VARIABLE)

    def uneven(plan: ParallelPlan) -> str:
        others = "".join(f" x --{name} {size}" for name in ("cp", "pp") if (size := getattr(plan, name)) > 1)
        return f"--num_processes {num_processes} is not divisible by --tp {plan.tp}{others}"

    return plan_of_sizes(sizes, num_processes, uneven)
