"""``meshwright launch``: accelerate's launcher with a parallel plan."""

from __future__ import annotations

import contextlib
import inspect
import json as json_format
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from meshwright_tools.cli.command import PlanSizes, failures_of, option, print_error, say, takes_options


class MixedPrecision(StrEnum):
    """The precision of accelerate's autocast."""

    no = "no"
    fp16 = "fp16"
    bf16 = "bf16"
    fp8 = "fp8"


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The processes to start, and what happens if one fails."""

    num_processes: int | None = option(
        "Number of processes over all machines (default: what the plan needs; without a plan, one per GPU)."
    )
    num_machines: str = option(
        "Number of machines, this one included (default: 1). With MIN:MAX, a restart goes on if at least MIN machines "
        "are left, and the planner then picks another plan.",
        metavar="N|MIN:MAX",
        default="1",
    )
    max_restarts: int = option(
        "Number of times that the script is started again after a process has failed (default: 0). The script must "
        "load its last checkpoint; MeshwrightTrainer does so by itself.",
        default=0,
    )
    machine_rank: int = option("Number of this machine, from 0.", default=0)
    main_process_ip: str | None = option(
        "Address at which all machines reach machine 0; required with several machines."
    )
    main_process_port: int | None = option("Port of machine 0 (default: a free one, or 29500 with several machines).")
    cpu: bool = option("Run on CPU even if there are GPUs.", "--cpu", default=False)
    mixed_precision: MixedPrecision | None = option(
        "Precision of accelerate's autocast (default: what accelerate config wrote, otherwise no)."
    )
    start_timeout: int = option("Seconds that the machines wait for each other.", default=300)
    resume: str | None = option(
        "Checkpoint of a Trainer to go on from, for a script whose MeshwrightTrainer.train() names none. A script that "
        "calls load_checkpoint needs no option."
    )
    job_id: str | None = option(
        "Name of a job that a scheduler starts again, the same each time. SIGTERM and SIGUSR1 then reach the script, "
        "which saves on all ranks and ends with exit code 75, and the job started again goes on from there. "
        "MeshwrightTrainer does both by itself; another script uses meshwright.Preemption and load_checkpoint."
    )
    oversubscribe: bool = option(
        "Allow more CPU processes on this machine than the limit: 8, or two per core if that is more.",
        "--oversubscribe",
        default=False,
    )


@takes_options
def launch(
    *,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python file to run, or with -m a module's name.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            help='Plan in words, for example "dp2 tp2+sp zero1", or a file that meshwright plan --save wrote '
            "(default: the plan of --dp, --tp and the sizes below)."
        ),
    ] = None,
    sizes: PlanSizes,
    options: LaunchOptions,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run SCRIPT as a module, as python -m does.")] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print how the launch has ended as JSON, on standard output; what the script prints goes to standard "
            "error.",
        ),
    ] = False,
) -> None:
    """Launch a script on several processes under a parallel plan.

    Starts the processes as accelerate launch does. to_distributed in the script takes the plan from --plan, or from
    --dp, --tp and the other sizes, or from the environment variable MESHWRIGHT_PLAN; otherwise it picks a plan. The
    script may use accelerate, the Trainer, or torch.distributed alone, and needs no plan of its own.

    If a process fails, the launcher ends all processes, names the newest whole checkpoint that they have saved and the
    command that goes on from it, and exits with the exit code of the failed one. With
    --max-restarts it starts all processes again instead. Ctrl-C ends all processes too.

    For example:

    \b
      meshwright launch --tp 2 --dp 2 -- train.py --lr 1e-4
      meshwright launch --tp 2 --dp 2 --max-restarts 10 train.py
      meshwright plan --model config.json --gpus 8 --save plan.yaml && meshwright launch --plan plan.yaml train.py
      meshwright launch --cpu --num-processes 2 -m my_package.train
      meshwright launch --plan plan.yaml --num-machines 2 --machine-rank 0 --main-process-ip 10.0.0.1 train.py
    """
    with failures_of("launch", json=json):
        from meshwright_hf.launch import job as launch_job  # here, since they need accelerate
        from meshwright_hf.launch import launcher

        script, arguments, is_module = launch_job.script_and_arguments(script, arguments or [])
        module = module or is_module
        after = launch_job.misplaced_options(script, arguments, _own_options())
        given = dict(vars(options))
        chosen = launch_job.find_plan(plan, sizes.given, options.num_processes)
        if after is not None:
            if chosen is None and options.num_processes is None:
                raise ValueError(after)
            say(f"meshwright launch: {after}", err=True)
        fewest, machines = launch_job.parse_machines(options.num_machines)
        if options.num_processes is None:
            count = chosen.world_size if chosen else launcher.default_processes(machines, options.cpu)
            given |= {"num_processes": count}
        precision = options.mixed_precision and options.mixed_precision.value
        given |= {"num_machines": machines, "min_machines": fewest, "mixed_precision": precision, "outlives": json}
        job = launch_job.Launch(script=script, arguments=arguments, module=module, plan=chosen, **given)
        with _script_on_stderr() if json else contextlib.nullcontext():
            ended = launcher.run(job)
    if json and ended.code:
        print_error("launch", "\n".join(ended.reasons), code=ended.code, kind="ProcessFailedError")
    elif json:
        shown = {"plan": None if chosen is None else chosen.label, "num_processes": job.num_processes}
        shown |= {"num_machines": job.num_machines, "machine_rank": job.machine_rank, "exit_code": ended.code}
        say(json_format.dumps(shown, indent=2))
    sys.exit(ended.code)


@contextlib.contextmanager
def _script_on_stderr() -> Iterator[None]:
    """Send what processes that are started meanwhile print to standard error."""
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(before, 1)
        os.close(before)


def _own_options() -> set[str]:
    """Return the names of the launcher's options, with their dashes."""
    names = [name for name in inspect.signature(launch).parameters if name not in ("script", "arguments", "module")]
    return {f"--{spelt}" for name in names for spelt in (name, name.replace("_", "-"))}
