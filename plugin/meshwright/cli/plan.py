"""``meshwright plan``: finds the fastest plans that fit a cluster and explains them."""

from __future__ import annotations

import importlib
import json as json_format
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.validate import LeaveOut, validate_estimator

if TYPE_CHECKING:
    from meshwright.planner.candidate import Job
    from meshwright.planner.hardware import Cluster, HardwareProfile
    from meshwright.planner.search import Search


class Emit(StrEnum):
    """The launcher whose configuration file is printed."""

    accelerate = "accelerate"


class Precision(StrEnum):
    """The dtype of the layers' matrix multiplications."""

    bf16 = "bf16"
    fp8 = "fp8"


def plan(
    model: Annotated[
        Path | None,
        typer.Option(
            help="transformers config.json, or a directory that holds one; no weights are read. Required unless "
            "--validate is given."
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="Number of devices in the cluster (default: 8, or as many as --profile measured)."),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="Number of devices per node (default: 8, or as many as --profile measured).")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Device model, for example a100-80, h100-sxm, h200, b200, rtx-4090 or cpu (default: h100-sxm, or the "
            "device that --profile measured)."
        ),
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.")] = 4096,
    global_batch: Annotated[int, typer.Option(help="Sequences per optimizer step, over all devices.")] = 64,
    precision: Annotated[Precision, typer.Option(help="Dtype of the layers' matrix multiplications.")] = Precision.bf16,
    interconnect: Annotated[
        float | None,
        typer.Option(
            help="Bandwidth from one device to other nodes, in Gb/s (default: that of the system in which the device "
            "is usually sold, or what --profile measured)."
        ),
    ] = None,
    memory: Annotated[float, typer.Option(help="Share of the device memory that a plan may fill, up to 1.")] = 0.9,
    profile: Annotated[
        Path | None,
        typer.Option(help="Profile that meshwright calibrate wrote (default: data sheets and typical efficiencies)."),
    ] = None,
    top: Annotated[int, typer.Option(help="Number of plans to show.")] = 5,
    allow_future: Annotated[
        bool, typer.Option(help="Also show plans that this version cannot run yet, such as context parallelism.")
    ] = False,
    json: Annotated[bool, typer.Option(help="Print the whole answer as JSON.")] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write the best plan to this YAML file, for meshwright launch --plan.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the answer to this HTML file: diagrams, a table of plans, and sliders for the job."),
    ] = None,
    emit: Annotated[
        Emit | None, typer.Option(help="Print a configuration file for accelerate launch instead of the answer.")
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Also run a step of the best plan on fake tensors and ranks, and compare its memory and collectives "
            "with the estimates.",
        ),
    ] = False,
    stage: Annotated[
        int | None,
        typer.Option(help="With --trace, rank of the pipeline to trace (default: the one that needs the most memory)."),
    ] = None,
    validate: Annotated[
        Path | None, typer.Option(help="Compare the estimator with the measured runs of this CSV file; plan nothing.")
    ] = None,
    calibrate_rows: Annotated[
        int, typer.Option(help="With --validate, number of runs of each source to fit the coefficients to first.")
    ] = 0,
    seed: Annotated[
        int,
        typer.Option(
            help="With --calibrate-rows, seed of the random half of the runs from which the runs to fit are chosen."
        ),
    ] = 0,
    leave_out: Annotated[
        LeaveOut,
        typer.Option(
            help="With --validate, runs to score: rows (all that were not fitted), model (one model at a time, fitted "
            "on the others), gpus (the larger GPU counts, fitted on the smaller) or test (the test split)."
        ),
    ] = LeaveOut.rows,
) -> None:
    """Find the fastest plans to train a model on a cluster.

    Prints their time and memory, and why other plans were not chosen. Needs no GPU, no cluster and no weights.

    A plan is a split of the devices over data (dp), tensor (tp), pipeline (pp) and context (cp) parallelism, a ZeRO
    stage, a micro-batch size, and a choice of layers that backward recomputes. It is printed in words:
    "dp32 tp2+sp zero1 mb1x16" means 32 data-parallel x 2 tensor-parallel ranks with sequence parallelism (sp), ZeRO
    stage 1, and 16 micro-batches of 1 sequence per step.

    For example:

    \b
      meshwright plan --model config.json --gpus 64 --gpu h100-sxm --seq-len 8192 --global-batch 512
      meshwright plan --model config.json --gpus 64 --html plan.html
      meshwright plan --model config.json --gpus 8 --save plan.yaml --emit accelerate > accelerate.yaml
      meshwright plan --validate runs.csv --calibrate-rows 8 --leave-out model
    """
    # Imported here so that --help is fast.
    from meshwright.planner.search import search
    from meshwright.planner.shapes import describe
    from meshwright.planner.space import Space

    try:
        if validate is not None:
            validate_estimator(validate, calibrate_rows, seed, leave_out, profile, json)
            return
        if model is None:
            raise ValueError("--model is missing; write --model config.json, or --validate runs.csv to plan nothing")
        if not 0 < memory <= 1:
            raise ValueError(f"--memory={memory} must be a share of the device's memory, above 0 and at most 1")
        if top < 1:
            raise ValueError(f"--top={top} must be at least 1")
        cluster, measured = _hardware(profile, gpu, gpus, gpus_per_node, interconnect)
        job = _job(cluster, measured, seq_len, global_batch, precision)
        space = Space(shape=describe(model), cluster=cluster, job=job, allow_future=allow_future)
        found = search(space, measured, top=top, budget=memory * cluster.device.memory)
        if emit is not None and (json or trace):
            raise ValueError(f"--emit {emit.value} prints a file; leave out {'--json' if json else '--trace'}")
        _show(model, found, json, save, html, emit)
        if trace:
            _trace(model, found, stage)
    except ValueError as error:
        typer.echo(f"meshwright plan: {error}", err=True)
        sys.exit(2)


def _hardware(
    profile: Path | None, gpu: str | None, gpus: int | None, gpus_per_node: int | None, interconnect: float | None
) -> tuple[Cluster, HardwareProfile | None]:
    """Return the cluster, and the profile if there is one."""
    from meshwright.planner.hardware import Cluster, HardwareProfile, device

    if interconnect is not None and not interconnect > 0:
        raise ValueError(f"--interconnect={interconnect} must be above zero Gb/s")
    measured = HardwareProfile.load(profile) if profile else None
    slow_link = interconnect and interconnect / 8 * 1e9
    if measured is not None and measured.device is not None:
        if gpu is not None:
            raise ValueError(
                f"--gpu {gpu} cannot be combined with {profile}, which measured {measured.device.name!r}; leave out "
                "one of them"
            )
        return measured.cluster(gpus=gpus, gpus_per_node=gpus_per_node, slow_link=slow_link), measured
    return Cluster(
        device=device(gpu or "h100-sxm"), gpus=8 if gpus is None else gpus,
        gpus_per_node=8 if gpus_per_node is None else gpus_per_node, slow_link=slow_link,
    ), measured  # fmt: skip


def _job(
    cluster: Cluster, measured: HardwareProfile | None, seq_len: int, global_batch: int, precision: Precision
) -> Job:
    """Return the job, in 32 bits if the profile measured float32 or the cluster has CPUs only."""
    from meshwright.planner.candidate import Job

    on_cpu = cluster.device.shares_host
    job = Job(seq_len=seq_len, global_batch=global_batch, precision=precision.value, own_runtime=True, on_cpu=on_cpu)
    dtype = measured.dtype if measured and measured.dtype else "float32" if on_cpu else "bfloat16"
    return job.in_32_bits() if dtype == "float32" else job


def _show(model: Path, found: Search, json: bool, save: Path | None, html: Path | None, emit: Emit | None) -> None:
    from meshwright.choose.plan_file import save_plan
    from meshwright.planner import explain

    if not found.choices:
        raise explain.no_fit(found)
    changed = explain.changes(found)
    if emit is not None:
        typer.echo(_accelerate_config(found, save))
    elif json:
        typer.echo(json_format.dumps(explain.as_dict(found, changed=changed), indent=2))
    else:
        typer.echo(explain.text(found, changed=changed))
    if html is not None:
        from meshwright.planner.page import write_page

        with typer.progressbar(length=1, label=f"Writing {html}", file=sys.stderr) as bar:

            def progress(done: int, total: int) -> None:
                bar.length = total
                if sys.stderr.isatty():
                    bar.update(done - bar.pos)

            write_page(found, html, changed=changed, model=str(model), progress=progress)
    if save is not None:
        best = found.choices[0]
        comment = (
            f"{found.shape.name} on {found.cluster.gpus} x {found.cluster.device.name}: {best.plan.label}, "
            f"{best.time.total:.3g} s per step estimated"
        )
        save_plan(best.plan, save, comment=comment)


def _accelerate_config(found: Search, save: Path | None) -> str:
    from meshwright.errors import PlanError

    plan = found.choices[0].plan
    if not plan.runs_today:
        raise PlanError(f"--emit: {plan.label} cannot run in this version; leave out --allow-future")
    # Imported by name, since the core works without accelerate and must not import it.
    config = importlib.import_module("meshwright_hf.accelerate_config")
    return str(
        config.accelerate_config(
            plan, found.cluster, saved=save,
            mixed_precision="no" if found.job.activation_bytes == 4 else found.job.precision,
        )
    )  # fmt: skip


def _trace(model: Path, found: Search, stage: int | None) -> None:
    import torch

    from meshwright.tracing.compare import model_on_meta, trace_and_compare

    plan = found.choices[0].plan
    typer.echo(f"\nTracing a step of {found.shape.name} on {plan.world_size} fake ranks...", err=True)
    dtype = torch.bfloat16 if found.job.weight_bytes == 2 else torch.float32
    typer.echo("\n" + trace_and_compare(model_on_meta(model, dtype), found.shape, plan, found.job, stage))
