"""Runs accelerate's launcher for one job under a plan, or writes the file for plain ``accelerate launch``, and tells
what came of it.

The plan decides the number of processes, which find it in their environment. If the script does not use the plan, it
trains by plain data parallelism or without any, and the launcher warns. If the run dies, the launcher names the newest
whole checkpoint of the run and the command that goes on from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.files.local_disk import SAVED_VARIABLE, noted
from meshwright.checkpoint.files.place import Place
from meshwright.checkpoint.format.checkpoint_folders import find_checkpoint, is_checkpoint
from meshwright.checkpoint.sealed import Seal
from meshwright.choose.given_plan import PLAN_VARIABLE, REPLAN_VARIABLE, USED_VARIABLE, plan_line
from meshwright.errors import CheckpointError, PlanError
from meshwright.faults.preemption import PREEMPTED
from meshwright.mesh.host import core_count
from meshwright.printable import shell_word, without_secrets
from meshwright_hf.launch.job import (
    LOOPBACK,
    RESUME_VARIABLE,
    Launch,
    check_port,
    free_port,
    interface_of,
    job_environment,
    local_address_towards,
    note_of_processes,
    say,
)
from meshwright_hf.versions import SAID_VARIABLE, outside_range
from meshwright_plan.job.candidate import Candidate
from meshwright_plan.machine.hardware import Cluster


def accelerate_config(plan: Candidate, cluster: Cluster, *, saved: Path | None, mixed_precision: str = "no") -> str:
    """Return the YAML that ``accelerate launch --config_file`` takes.

    The file sets the number of processes and machines. It cannot contain the plan, since accelerate refuses unknown
    keys. The script gets the plan from an environment variable, which a comment in the file shows.

    Args:
        plan: a plan that this version can run.
        cluster: the machines, with a process for each device.
        saved: the plan file beside it, if one was written.
        mixed_precision: accelerate's name of the planned precision: no, bf16 or fp8.
    """
    cpu = cluster.device.is_cpu
    value = shell_word(saved if saved else plan_line(plan.plan.changed))
    variables = f"{PLAN_VARIABLE}={value} " + ("ACCELERATE_USE_CPU=true " if cpu else "")
    address = " --machine_rank RANK --main_process_ip ADDRESS_OF_MACHINE_0" if cluster.nodes > 1 else ""
    lines = [
        f"# {plan.label}. This file cannot hold the plan, so the environment passes it on:",
        f"#   {variables}accelerate launch --config_file THIS_FILE{address} train.py",
        "compute_environment: LOCAL_MACHINE",
        # torchrun's launcher, for CPUs too: MULTI_CPU would start one process.
        f"distributed_type: {'MULTI_GPU' if cluster.gpus > 1 else repr('NO')}",
        f"use_cpu: {str(cpu).lower()}",
        f"num_processes: {cluster.gpus}",
        f"num_machines: {cluster.nodes}",
        "machine_rank: 0",
        "main_process_port: 29500",
        "rdzv_backend: static",
        "same_network: true",
        "main_training_function: main",
        f"mixed_precision: {mixed_precision if mixed_precision != 'no' else repr('no')}",
    ]
    return "\n".join(lines)


DEFAULT_PORT = 29500  # torch's and accelerate's
TRIED_ON_CPU = 8  # number of processes that a machine may start however few cores it has
_OF_TRAINER = "trainer_state.json"
CURES = """\
  Trainer:     from meshwright_hf.trainer import MeshwrightTrainer as Trainer  # was: from transformers import Trainer
  accelerate:  from meshwright_hf.accelerate import Accelerator  # was: from accelerate import Accelerator
  plain loop:  model, optimizer, loader = meshwright.to_distributed(model, optimizer, loader)"""


def default_processes(num_machines: int, cpu: bool) -> int:
    """Return the default number of processes: this machine's number of GPUs times the number of machines.

    Raises:
        PlanError: if ``cpu`` is set or this machine has no GPUs, so that there is no default.
    """
    gpus = 0 if cpu else _gpus()
    if gpus == 0:
        raise PlanError("pass the number of processes on CPU: --num_processes N, or a plan, e.g. --dp 2 --tp 2")
    return gpus * num_machines


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a launch has ended.

    Args:
        code: the exit code of the first process that failed; 0 if none has.
        reasons: lines about the failure, which the user was told.
    """

    code: int
    reasons: tuple[str, ...] = ()


def run(job: Launch) -> Ended:
    """Start the processes of this machine, and wait until they end.

    Raises:
        PlanError: if accelerate is missing, there are too few GPUs, a port is in use, or another machine does not join.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise PlanError(
            "meshwright launch calls accelerate's launcher, but accelerate is not installed; "
            "pip install 'meshwright[hf]' (a script without accelerate can be started by torchrun too)"
        )
    if untested := outside_range():
        say(untested)
    on_cpu = job.cpu or _gpus() == 0
    if not on_cpu and job.local_processes > _gpus():
        raise PlanError(
            f"{job.local_processes} processes on this machine need as many GPUs, but it has {_gpus()}; use fewer "
            "--num_processes, more --num_machines, or --cpu"
        )
    cores = core_count()
    most = max(TRIED_ON_CPU, 2 * cores)  # a few per core are only slow, more would stop the machine from responding
    if on_cpu and job.local_processes > most and not job.oversubscribe:
        raise PlanError(
            f"{job.local_processes} processes on this machine, which has {cores} CPU cores: each would get "
            f"{cores / job.local_processes:.1%} of a core, and memory for a model of its own. Start at most {most} "
            "here, with smaller sizes of the plan or more --num_machines; or add --oversubscribe to start them anyway"
        )
    job = _with_address(job)
    os.environ.update(_environment(job, on_cpu))
    say(_in_words(job, on_cpu))
    return _run(job, accelerate_arguments(job, on_cpu=on_cpu))


def accelerate_arguments(job: Launch, *, on_cpu: bool) -> list[str]:
    """Return the arguments of ``accelerate launch``.

    Launches on CPU also use torchrun (``--multi_gpu``), since ``--cpu`` always starts one process.

    Args:
        job: the launch, with an address and a port.
        on_cpu: whether the processes run on CPU.
    """
    configuration = _configuration()
    unless_configured = "no" if configuration is None else None  # accelerate's default, passed to avoid its warning
    options: dict[str, Any] = {
        "config_file": configuration,  # passed, since with --cpu accelerate would not read it
        "num_processes": job.num_processes,
        "num_machines": job.num_machines,
        "machine_rank": job.machine_rank,
        "main_process_ip": job.main_process_ip,
        "main_process_port": job.main_process_port,
        "rdzv_backend": "static",  # other backends number the machines in the order of joining
        "mixed_precision": job.mixed_precision or unless_configured,
        "dynamo_backend": unless_configured,
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


def _configuration() -> str | None:
    """Return the path of the file that ``accelerate config`` wrote; None if there is none."""
    from accelerate.commands.config import default_config_file

    return default_config_file if os.path.isfile(default_config_file) else None


def _threads(job: Launch, on_cpu: bool) -> int | None:
    """Return the threads per process: on CPU the cores divided by the processes; None for accelerate's default."""
    if not on_cpu or "OMP_NUM_THREADS" in os.environ:
        return None
    import psutil

    # A thread per physical core: two threads of one core share its arithmetic units.
    return max(1, min(psutil.cpu_count(logical=False) or core_count(), core_count()) // job.local_processes)


def _with_address(job: Launch) -> Launch:
    """Return the launch with a missing address and port filled in; check the port on the machine that listens."""
    port = job.main_process_port
    if port is None:
        port = free_port() if job.num_machines == 1 else DEFAULT_PORT
    if job.machine_rank == 0 and (job.num_processes > 1 or job.max_restarts):
        check_port(port)
    return dataclasses.replace(job, main_process_ip=job.main_process_ip or LOOPBACK, main_process_port=port)


def _environment(job: Launch, on_cpu: bool) -> dict[str, str]:
    """Return the environment variables to set besides accelerate's; GLOO_SOCKET_IFNAME is kept if the user set it."""
    environment = {} if job.resume is None else {RESUME_VARIABLE: job.resume}
    if untested := outside_range():
        environment[SAID_VARIABLE] = untested
    if job.job_id is not None:
        environment |= job_environment(job.job_id)
    if on_cpu:
        environment["ACCELERATE_USE_CPU"] = "true"
        if "DS_ACCELERATOR" not in os.environ:  # without it, accelerate's import of DeepSpeed warns on every rank
            environment["DS_ACCELERATOR"] = "cpu"
    if job.plan is not None:
        environment[PLAN_VARIABLE] = plan_line(dataclasses.asdict(job.plan))
    if job.may_shrink:
        environment[REPLAN_VARIABLE] = "1"
    if job.num_processes > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        assert job.main_process_ip is not None
        # By default gloo announces the address of the host's name, which is often 127.0.1.1.
        interface = interface_of(local_address_towards(job.main_process_ip))
        if interface is not None:
            environment["GLOO_SOCKET_IFNAME"] = interface
        elif job.num_machines > 1:
            raise PlanError(
                f"no network interface of this machine has the address that leads to --main_process_ip "
                f"{job.main_process_ip}; name the interface, e.g. GLOO_SOCKET_IFNAME=eth0"
            )
    return environment


def _in_words(job: Launch, on_cpu: bool) -> str:
    """Return one line that describes the plan, the processes and the machine."""
    plan = "a plan that to_distributed picks"
    if job.plan is not None:
        plan = " ".join(f"{name}={value}" for name, value in job.plan.changed.items()) or "one device"
    what = f"{plan}, {job.num_processes} {'CPU' if on_cpu else 'GPU'} process{'es' * (job.num_processes > 1)}"
    if job.num_machines == 1:
        return what
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    where = f"machine {job.machine_rank} of {job.num_machines} starts {job.local_processes}"
    return f"{what}; {where}, meeting at {job.main_process_ip}:{job.main_process_port} over {interface}"


def _run(job: Launch, arguments: list[str]) -> Ended:
    """Run accelerate's launcher in this process. For one process that nothing outlives, exec the script instead."""
    from accelerate.commands import launch as accelerate
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    options = accelerate.launch_command_parser().parse_args(arguments)
    if job.num_processes == 1 and not job.max_restarts and not job.outlives:
        # accelerate would wait for the script, hide its exit code, and not pass our signals to it.
        command, environment = prepare_simple_launcher_cmd_env(accelerate._validate_launch_command(options)[0])
        if job.job_id is not None:  # it waits until the program has imported what can act on it
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        os.execvpe(command[0], command, environment)
    with saves_noted() as last_words:
        ended = _wait(job, options)
        if ended.code:
            ended = dataclasses.replace(ended, reasons=(*ended.reasons, *last_words(job)))
    for line in ended.reasons:
        say(line)
    return ended


def _wait(job: Launch, options: Mapping[str, object]) -> Ended:
    """Run accelerate's launcher in this process, and wait until the processes end."""
    from accelerate.commands import launch as accelerate
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from meshwright_hf.launch.elastic import elastic_agent, first_failure

    try:
        with watched_plan(job), elastic_agent(job) as announced:
            if job.num_processes == 1:  # accelerate would start it without torchrun, which does the restarts
                accelerate.multi_gpu_launcher(accelerate._validate_launch_command(options)[0])
            else:
                accelerate.launch_command(options)
    except ChildFailedError as error:
        _, code, how = first_failure(error.failures)
        after = f" after {job.max_restarts} restart(s)" if job.max_restarts and not announced else ""
        if code == PREEMPTED and job.job_id is not None:
            after = f": job {job.job_id} is preempted, and goes on when it is started again"
        return Ended(code=code, reasons=(f"{how}{after}; all processes of this machine are ended",))
    except SignalException as error:
        _end_the_rest()
        reason = f"{error.sigval.name}; all processes of this machine are ended"
        return Ended(code=128 + error.sigval, reasons=(reason,))
    except (DistError, RendezvousError) as error:
        raise PlanError(_why_not_met(job, error)) from error
    return Ended(code=0)


def _end_the_rest() -> None:
    """Kill the remaining processes after the launcher was interrupted, e.g. by a second Ctrl-C."""
    import psutil

    rest = psutil.Process().children(recursive=True)
    for process in rest:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(rest, timeout=5)


def _why_not_met(job: Launch, error: Exception) -> str:
    meeting = f"{job.main_process_ip}:{job.main_process_port}"
    summary = (str(error) or type(error).__name__).splitlines()[0]
    if job.machine_rank == 0:
        return (
            f"not all of the {job.min_machines or job.num_machines} machines joined at {meeting} within "
            f"{job.start_timeout} s ({summary}); start this command on each, with its own --machine_rank"
        )
    return (
        f"machine 0 was not reached at {meeting} within {job.start_timeout} s ({summary}); check that it is "
        "started, with the same --num_machines, --main_process_ip and --main_process_port"
    )


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


@contextlib.contextmanager
def watched_plan(job: Launch) -> Iterator[None]:
    """Warn at the start if the script does not name meshwright, and at the end if no process asked for the plan.

    The warning at the end is printed unless the context ends by an exception, as it does if a process fails.

    Args:
        job: the launch; the processes must inherit this process's environment while the context is open.
    """
    if job.plan is None or job.plan.world_size == 1 or job.machine_rank != 0:
        yield
        return
    if not job.names(b"meshwright"):
        say(
            f"{job.script} does not import meshwright. Unless a module that it imports does, the plan "
            f"{job.plan.label!r} has no effect, and {_instead(job)}"
        )
    with note_of_processes(USED_VARIABLE) as mark:
        yield
        if not mark.exists():
            say(
                f"the plan {job.plan.label!r} was never used: no process called to_distributed, or an integration that "
                f"does. Without it, {_instead(job)}. To train under the plan, change a line of the script:\n{CURES}"
            )


def _instead(job: Launch) -> str:
    return (
        f"a Trainer or an Accelerator trains by DistributedDataParallel, with {job.num_processes} times the batch of "
        "one process"
    )


@contextlib.contextmanager
def saves_noted() -> Iterator[Callable[[Launch], list[str]]]:
    """Have the processes note what they save, while the context is open; they inherit this process's environment.

    Yields a function that returns what to say of the saves of a run that has died.
    """
    with note_of_processes(SAVED_VARIABLE) as path:
        yield lambda job: _last_words(job, noted(path))


def _last_words(job: Launch, saved: list[Place]) -> list[str]:
    newest = next(filter(_is_whole, saved), None)
    if newest is None:
        return []
    lines, resume = [f"the newest whole checkpoint of this run is {newest}"], []
    if isinstance(newest, Path) and (newest / _OF_TRAINER).exists():
        resume = ["--resume", str(newest)]
    elif is_checkpoint(newest) and not job.names(b"load_checkpoint"):
        lines.append(
            f"the script does not load it yet; write after to_distributed: meshwright.load_checkpoint("
            f"{str(newest.parent)!r}, model, optimizer, loader=loader, missing_ok=True)"
        )
    return [*lines, f"the command that goes on from it: {_command(job, resume)}"]


def _is_whole(folder: Place) -> bool:
    """Return whether a folder is a checkpoint to go on from, not of the model alone, and has all of its files."""
    try:
        if is_checkpoint(folder):
            return find_checkpoint(folder) is not None
        if not isinstance(folder, Path):
            return False
        is_of_run = (folder / _OF_TRAINER).exists() or any(folder.glob("random_states_*"))
        return is_of_run and not Seal.read(folder).problems(folder)
    except (CheckpointError, OSError):
        return False


def _command(job: Launch, resume: list[str]) -> str:
    """Return the command of this launch, with the options ``resume`` in place of an earlier ``--resume``."""
    if "launch" in sys.argv:
        given = sys.argv[sys.argv.index("launch") + 1 :]
    else:
        plan = ["--plan", job.plan.label] if job.plan is not None else ["--num_processes", str(job.num_processes)]
        given = [*plan, *(["-m"] if job.module else []), job.script, *job.arguments]
    if resume and "--resume" in given[:-1] and given.index("--resume") < given.index(job.script):
        at = given.index("--resume")
        given = given[:at] + given[at + 2 :]
    return " ".join(map(shell_word, ["meshwright", "launch", *resume, *without_secrets(given)]))
