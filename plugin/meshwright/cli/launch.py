"""``meshwright launch``: accelerate's launcher with a parallel plan."""

from __future__ import annotations

import importlib
import inspect
import sys
from enum import StrEnum
from typing import Annotated

import typer

from meshwright.cli.options import Sizes, takes_options


class MixedPrecision(StrEnum):
    """The precision of accelerate's autocast."""

    no = "no"
    fp16 = "fp16"
    bf16 = "bf16"
    fp8 = "fp8"


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
    sizes: Sizes,
    num_processes: Annotated[
        int | None,
        typer.Option(
            "--num_processes",
            "--num-processes",
            help="Number of processes over all machines (default: what the plan needs; without a plan, one per GPU).",
        ),
    ] = None,
    num_machines: Annotated[
        str,
        typer.Option(
            "--num_machines",
            "--num-machines",
            metavar="N|MIN:MAX",
            help="Number of machines, this one included (default: 1). With MIN:MAX, a restart goes on if at least MIN "
            "machines are left, and the planner then picks another plan.",
        ),
    ] = "1",
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            "--max_restarts",
            help="Number of times that the script is started again after a process has failed (default: 0). The "
            "script must load its last checkpoint; MeshwrightTrainer does so by itself.",
        ),
    ] = 0,
    machine_rank: Annotated[
        int, typer.Option("--machine_rank", "--machine-rank", help="Number of this machine, from 0.")
    ] = 0,
    main_process_ip: Annotated[
        str | None,
        typer.Option(
            "--main_process_ip",
            "--main-process-ip",
            help="Address at which all machines reach machine 0; required with several machines.",
        ),
    ] = None,
    main_process_port: Annotated[
        int | None,
        typer.Option(
            "--main_process_port",
            "--main-process-port",
            help="Port of machine 0 (default: a free one, or 29500 with several machines).",
        ),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run on CPU even if there are GPUs.")] = False,
    mixed_precision: Annotated[
        MixedPrecision | None,
        typer.Option(
            "--mixed_precision",
            "--mixed-precision",
            help="Precision of accelerate's autocast (default: what accelerate config wrote, otherwise no).",
        ),
    ] = None,
    start_timeout: Annotated[
        int, typer.Option("--start_timeout", "--start-timeout", help="Seconds that the machines wait for each other.")
    ] = 300,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint of a Trainer to go on from, for a script whose MeshwrightTrainer.train() names none. A "
            "script that calls load_checkpoint needs no option."
        ),
    ] = None,
    oversubscribe: Annotated[
        bool,
        typer.Option(
            "--oversubscribe",
            help="Allow more CPU processes on this machine than the limit: 8, or two per core if that is more.",
        ),
    ] = False,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run SCRIPT as a module, as python -m does.")] = False,
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
      meshwright launch --cpu --num_processes 2 -m my_package.train
      meshwright launch --plan plan.yaml --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 train.py
    """
    try:
        # Imported by name, since the core works without accelerate and must not import it.
        launch_job = importlib.import_module("meshwright_hf.launch_job")
        launcher = importlib.import_module("meshwright_hf.launcher")
        script, arguments, is_module = launch_job.script_and_arguments(script, arguments or [])
        module = module or is_module
        after = launch_job.misplaced_options(script, arguments, _own_options())
        chosen = launch_job.find_plan(plan, sizes.given, num_processes)
        if after is not None:
            if chosen is None and num_processes is None:
                raise ValueError(after)
            typer.echo(f"meshwright launch: {after}", err=True)
        fewest, machines = launch_job.parse_machines(num_machines)
        if num_processes is None:
            num_processes = chosen.world_size if chosen else launcher.default_processes(machines, cpu)
        job = launch_job.Launch(
            script=script, arguments=arguments, module=module, plan=chosen, num_processes=num_processes,
            num_machines=machines, min_machines=fewest, max_restarts=max_restarts, machine_rank=machine_rank,
            main_process_ip=main_process_ip, main_process_port=main_process_port, cpu=cpu, start_timeout=start_timeout,
            mixed_precision=mixed_precision and mixed_precision.value, oversubscribe=oversubscribe, resume=resume,
        )  # fmt: skip
        code = launcher.run(job)
    except ValueError as error:
        typer.echo(f"meshwright launch: {error}", err=True)
        code = 2
    except KeyboardInterrupt:
        typer.echo("meshwright launch: interrupted", err=True)
        code = 130
    sys.exit(code)


def _own_options() -> set[str]:
    """Return the names of the launcher's options, with their dashes."""
    names = [name for name in inspect.signature(launch).parameters if name not in ("script", "arguments", "module")]
    return {f"--{spelt}" for name in names for spelt in (name, name.replace("_", "-"))}
