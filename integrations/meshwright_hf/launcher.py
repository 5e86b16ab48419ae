"""accelerate's launcher, with a plan: the processes that it needs, and the plan in their environment."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.automatic import plan_of_fields
from meshwright.config import ParallelPlan
from meshwright.errors import PlanError
from meshwright.planner.plan_file import PLAN_VARIABLE, launched_plan, plan_line, read_plan
from meshwright_hf import network

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

DEFAULT_PORT = 29500  # torch's and accelerate's
START_TIMEOUT = 300  # seconds that machines wait for each other


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What to start on this machine.

    Args:
        script: a Python file, or with ``module`` the name of a module.
        arguments: of the script.
        module: run the script as ``python -m`` does.
        plan: handed to the script's ``to_distributed``; None to have that pick one.
        num_processes: over all machines.
        num_machines: machines, each of which is started by a command of its own.
        machine_rank: this machine's number, from 0.
        main_process_ip: the address of machine 0; may be left out for one machine.
        main_process_port: on which machine 0 listens; any free one on one machine, else 29500.
        cpu: run on CPU also where there are GPUs.
        mixed_precision: of accelerate ("no", "fp16", "bf16", "fp8"); None for what its configuration says.
        start_timeout: seconds that machines wait for each other.

    Raises:
        PlanError: numbers that do not fit together, naming both, or a script that is not there.

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
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    cpu: bool = False
    mixed_precision: str | None = None
    start_timeout: int = START_TIMEOUT

    def __post_init__(self) -> None:
        for name in ("num_processes", "num_machines", "start_timeout"):
            if getattr(self, name) < 1:
                raise PlanError(f"--{name} {getattr(self, name)} must be at least 1")
        if self.num_processes % self.num_machines:
            raise PlanError(
                f"--num_processes {self.num_processes} cannot be spread evenly over --num_machines "
                f"{self.num_machines}; it counts the processes of all machines together"
            )
        if not 0 <= self.machine_rank < self.num_machines:
            raise PlanError(
                f"--machine_rank {self.machine_rank} must be from 0 to {self.num_machines - 1}, for --num_machines "
                f"{self.num_machines}"
            )
        if self.num_machines > 1 and self.main_process_ip is None:
            raise PlanError(
                f"--num_machines {self.num_machines} needs --main_process_ip, the address of machine 0 under which all "
                "machines reach it"
            )
        if self.main_process_port is not None and not 0 < self.main_process_port < 2**16:
            raise PlanError(f"--main_process_port {self.main_process_port} must be from 1 to 65535")
        if self.plan is not None and self.plan.world_size != self.num_processes:
            raise PlanError(
                f"the plan dp={self.plan.dp} x tp={self.plan.tp} x cp={self.plan.cp} x pp={self.plan.pp} needs "
                f"{self.plan.world_size} processes, but --num_processes is {self.num_processes}; leave it out, or "
                "change the plan's sizes"
            )
        if not self.module and not Path(self.script).is_file():
            hint = "; modules are started with -m" if not self.script.endswith(".py") else ""
            raise PlanError(f"there is no script {self.script}{hint}")

    @property
    def local_processes(self) -> int:
        """Processes on this machine."""
        return self.num_processes // self.num_machines


def find_plan(path: Path | None, sizes: dict[str, Any], num_processes: int | None) -> ParallelPlan | None:
    """Return the plan to launch with: a file's, one of given sizes, the environment's, or None.

    Args:
        path: a plan file.
        sizes: fields of ``ParallelPlan`` that the user named.
        num_processes: with sizes but no dp, dp takes up what the others leave of these.

    Raises:
        PlanError: a file and sizes at once, sizes that do not divide the processes, or no plan at all.
    """
    if path is not None:
        if sizes:
            given = ", ".join(f"--{name} {value}" for name, value in sizes.items())
            raise PlanError(f"--plan {path} and {given} both say the plan; leave one of them out")
        return plan_of_fields(read_plan(path), str(path))
    if not sizes:
        fields = launched_plan()
        return None if fields is None else plan_of_fields(fields, PLAN_VARIABLE)
    plan = ParallelPlan(**sizes)
    if num_processes is None or "dp" in sizes:
        return plan
    if num_processes % plan.world_size:
        raise PlanError(f"--num_processes {num_processes} is not divisible by --tp {plan.tp}")
    return dataclasses.replace(plan, dp=num_processes // plan.world_size)


def default_processes(num_machines: int, cpu: bool) -> int:
    """As many as there are GPUs on all machines, if they are like this one.

    Raises:
        PlanError: without GPUs.
    """
    gpus = 0 if cpu else _gpus()
    if gpus == 0:
        raise PlanError("say how many processes to start on CPU: --num_processes N, or a plan, e.g. --dp 2 --tp 2")
    return gpus * num_machines


def run(job: Launch) -> int:
    """Start the processes of this machine and wait for them; return the exit code of the first that failed.

    Raises:
        PlanError: accelerate is missing, there are too few GPUs, a port is in use, or another machine does not come.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise PlanError(
            "meshwright launch calls accelerate's launcher, and accelerate is not installed: "
            "pip install 'meshwright[hf]' (a script without accelerate can be started by torchrun too)"
        )
    on_cpu = job.cpu or _gpus() == 0
    if not on_cpu and job.local_processes > _gpus():
        raise PlanError(
            f"{job.local_processes} processes on this machine need as many GPUs, and it has {_gpus()}; use fewer "
            "--num_processes, more --num_machines, or --cpu"
        )
    job = _with_address(job)
    os.environ.update(_environment(job, on_cpu))
    print(f"meshwright launch: {_in_words(job, on_cpu)}", file=sys.stderr, flush=True)
    return _run(job, accelerate_arguments(job, on_cpu=on_cpu))


def accelerate_arguments(job: Launch, *, on_cpu: bool) -> list[str]:
    """Return what ``accelerate launch`` is given.

    torchrun's way (``--multi_gpu``) also serves CPUs: ``--cpu`` would start one process, whatever their number.

    Args:
        job: with an address and a port.
        on_cpu: what it runs on.
    """
    options: dict[str, Any] = {
        "num_processes": job.num_processes,
        "num_machines": job.num_machines,
        "machine_rank": job.machine_rank,
        "main_process_ip": job.main_process_ip,
        "main_process_port": job.main_process_port,
        "mixed_precision": job.mixed_precision or _unless_configured("no"),
        "dynamo_backend": _unless_configured("no"),
        "num_cpu_threads_per_process": _threads(job, on_cpu),
        "rdzv_conf": f"timeout={job.start_timeout}" if job.num_machines > 1 else None,
    }
    arguments = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
    if job.num_processes > 1:
        arguments.append("--multi_gpu")
    elif on_cpu:
        arguments.append("--cpu")
    arguments += ["--module"] if job.module else []
    return [*arguments, job.script, *job.arguments]


def _unless_configured(value: str) -> str | None:
    """What accelerate takes by itself, said so that it does not warn; its configuration file goes first."""
    from accelerate.commands.config import default_config_file

    return None if os.path.isfile(default_config_file) else value


def _threads(job: Launch, on_cpu: bool) -> int | None:
    """Of each process; None for what accelerate takes. On CPU the cores are shared out, as accelerate means to."""
    if not on_cpu or "OMP_NUM_THREADS" in os.environ:
        return None
    import psutil

    return max(1, (psutil.cpu_count(logical=False) or os.cpu_count() or 1) // job.local_processes)


def _with_address(job: Launch) -> Launch:
    """The address and the port to meet at, chosen where they were left out, and tried on the machine that listens."""
    port = job.main_process_port
    if port is None:
        port = network.free_port() if job.num_machines == 1 else DEFAULT_PORT
    if job.machine_rank == 0 and job.num_processes > 1:
        network.check_port(port)
    return dataclasses.replace(job, main_process_ip=job.main_process_ip or network.LOOPBACK, main_process_port=port)


def _environment(job: Launch, on_cpu: bool) -> dict[str, str]:
    """What the processes inherit beside what accelerate sets; what the user set is left alone."""
    environment = {}
    if on_cpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    if job.plan is not None:
        environment[PLAN_VARIABLE] = plan_line(dataclasses.asdict(job.plan))
    if job.num_processes > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        assert job.main_process_ip is not None
        # Left alone, gloo tells the others the address of the host's name, which is often 127.0.1.1.
        interface = network.interface_of(network.local_address_towards(job.main_process_ip))
        if interface is not None:
            environment["GLOO_SOCKET_IFNAME"] = interface
        elif job.num_machines > 1:
            raise PlanError(
                f"no network interface of this machine has the address that leads to --main_process_ip "
                f"{job.main_process_ip}; name the interface, e.g. GLOO_SOCKET_IFNAME=eth0"
            )
    return environment


def _in_words(job: Launch, on_cpu: bool) -> str:
    """What is started where, in one line."""
    plan = "a plan that to_distributed picks"
    if job.plan is not None:
        changed = {f.name: getattr(job.plan, f.name) for f in dataclasses.fields(job.plan)}
        changed = {name: value for name, value in changed.items() if value != getattr(ParallelPlan(), name)}
        plan = " ".join(f"{name}={value}" for name, value in changed.items()) or "one device"
    what = f"{plan}, {job.num_processes} {'CPU' if on_cpu else 'GPU'} process{'es' * (job.num_processes > 1)}"
    if job.num_machines == 1:
        return what
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    where = f"machine {job.machine_rank} of {job.num_machines} starts {job.local_processes}"
    return f"{what}; {where}, meeting at {job.main_process_ip}:{job.main_process_port} over {interface}"


def _run(job: Launch, arguments: list[str]) -> int:
    """Hand over to accelerate, in this process; with a single one to start, become it."""
    from accelerate.commands import launch as accelerate
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = accelerate.launch_command_parser().parse_args(arguments)
    if job.num_processes == 1:
        # accelerate would wait for it, and hide its exit code and our signals from it.
        command, environment = prepare_simple_launcher_cmd_env(accelerate._validate_launch_command(options)[0])
        os.execvpe(command[0], command, environment)
    try:
        accelerate.launch_command(options)
    except ChildFailedError as error:
        return _first_failure(error)
    except SignalException as error:
        print(f"meshwright launch: {error.sigval.name}; all processes of this machine are ended", file=sys.stderr)
        return 128 + error.sigval
    except DistError as error:
        raise PlanError(_why_not_met(job, error)) from error
    return 0


def _first_failure(error: ChildFailedError) -> int:
    """Name the process that failed first, and return its exit code as a shell would."""

    def order(item: tuple[int, Any]) -> tuple[bool, int, int]:
        # The others were ended by SIGTERM because of it, within the same second.
        return item[1].exitcode == -signal.SIGTERM, item[1].timestamp, item[0]

    rank, failure = min(error.failures.items(), key=order)
    code = failure.exitcode
    how = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    print(f"meshwright launch: rank {rank} {how}; all processes of this machine are ended", file=sys.stderr)
    return code if code > 0 else 128 - code


def _why_not_met(job: Launch, error: Exception) -> str:
    meeting = f"{job.main_process_ip}:{job.main_process_port}"
    summary = str(error).splitlines()[0]
    if job.machine_rank == 0:
        return (
            f"not all of the {job.num_machines} machines came to {meeting} within {job.start_timeout} s ({summary}); "
            "start this command on each, with its own --machine_rank"
        )
    return (
        f"machine 0 was not reached at {meeting} within {job.start_timeout} s ({summary}); is it started, with the "
        "same --num_machines, --main_process_ip and --main_process_port?"
    )


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
