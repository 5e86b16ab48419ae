"""``meshwright launch``: accelerate's launcher, with a plan."""

from __future__ import annotations

import importlib
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer


class Recompute(StrEnum):
    """What backward computes again."""

    none = "none"
    full = "full"


class MixedPrecision(StrEnum):
    """Of accelerate's autocast."""

    no = "no"
    fp16 = "fp16"
    bf16 = "bf16"
    fp8 = "fp8"


def launch(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The program, or with -m the name of a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Of the script.")] = None,
    plan: Annotated[
        str | None,
        typer.Option(help='Plan in words, as in "dp2 tp2+sp zero1", or the file that meshwright plan --save wrote.'),
    ] = None,
    dp: Annotated[int | None, typer.Option(help="Data parallel; by default what the others leave.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor parallel.")] = None,
    sequence_parallel: Annotated[
        bool | None, typer.Option("--sequence-parallel/--no-sequence-parallel", help="With --tp.")
    ] = None,
    zero_stage: Annotated[int | None, typer.Option(help="Of ZeRO, over dp.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Rows of a process that run at once.")] = None,
    recompute: Annotated[Recompute | None, typer.Option(help="Layers in backward.")] = None,
    num_processes: Annotated[
        int | None,
        typer.Option("--num_processes", "--num-processes", help="Over all machines; the plan's, or one for each GPU."),
    ] = None,
    num_machines: Annotated[int, typer.Option("--num_machines", "--num-machines", help="This one included.")] = 1,
    machine_rank: Annotated[int, typer.Option("--machine_rank", "--machine-rank", help="Of this one, from 0.")] = 0,
    main_process_ip: Annotated[
        str | None, typer.Option("--main_process_ip", "--main-process-ip", help="Of machine 0, as the others reach it.")
    ] = None,
    main_process_port: Annotated[
        int | None,
        typer.Option(
            "--main_process_port", "--main-process-port", help="Of machine 0; any free one, or 29500 for many machines."
        ),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run on CPU, also where there are GPUs.")] = False,
    mixed_precision: Annotated[
        MixedPrecision | None, typer.Option("--mixed_precision", "--mixed-precision", help="Of accelerate's autocast.")
    ] = None,
    start_timeout: Annotated[
        int, typer.Option("--start_timeout", "--start-timeout", help="Seconds that machines wait for each other.")
    ] = 300,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Start more processes than the CPU's cores can serve.")
    ] = False,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run the script as python -m does.")] = False,
) -> None:
    """Start a script as many processes, as accelerate launch does, and give its to_distributed the plan.

    The plan is a file's, or the sizes; without either to_distributed picks one. The script may use accelerate, the
    Trainer, or torch.distributed alone, and needs no plan of its own. When a process fails all are ended, and its exit
    code is the launcher's. Ctrl-C ends them too.

    For example:

      meshwright launch --tp 2 --dp 2 -- train.py --lr 1e-4

      meshwright plan --model config.json --gpus 8 --save plan.yaml && meshwright launch --plan plan.yaml train.py

      meshwright launch --cpu --num_processes 2 -m my_package.train

      meshwright launch --plan plan.yaml --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 train.py
    """
    sizes: dict[str, Any] = {
        "dp": dp, "tp": tp, "sequence_parallel": sequence_parallel, "zero_stage": zero_stage,
        "micro_batch_size": micro_batch_size, "recompute": recompute and recompute.value,
    }  # fmt: skip
    sizes = {name: value for name, value in sizes.items() if value is not None}
    try:
        # By name: the core works without accelerate, and no import of it may creep in.
        launch_job = importlib.import_module("meshwright_hf.launch_job")
        launcher = importlib.import_module("meshwright_hf.launcher")
        chosen = launch_job.find_plan(plan, sizes, num_processes)
        if num_processes is None:
            num_processes = chosen.world_size if chosen else launcher.default_processes(num_machines, cpu)
        job = launch_job.Launch(
            script=script, arguments=arguments or [], module=module, plan=chosen, num_processes=num_processes,
            num_machines=num_machines, machine_rank=machine_rank, main_process_ip=main_process_ip,
            main_process_port=main_process_port, cpu=cpu, start_timeout=start_timeout,
            mixed_precision=mixed_precision and mixed_precision.value, oversubscribe=oversubscribe,
        )  # fmt: skip
        code = launcher.run(job)
    except ValueError as error:
        typer.echo(f"meshwright launch: {error}", err=True)
        code = 2
    except KeyboardInterrupt:
        typer.echo("meshwright launch: interrupted", err=True)
        code = 130
    sys.exit(code)
