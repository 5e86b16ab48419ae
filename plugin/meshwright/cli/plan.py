"""``meshwright plan``: finds the fastest plans that fit a cluster, and answers what they cost."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.options import (
    OWN_PLAN,
    ContextMethod,
    CpSize,
    InCheckout,
    PipelineSchedule,
    PpSize,
    RecomputedLayers,
    RecomputeKind,
    SequenceParallel,
    TpSize,
    UlyssesSize,
    ZeroStage,
    given_sizes,
)

_JOB = "What is trained, and where"
_RUN = "The whole run: days, GPU-hours and cost"
_OUTPUT = "Output"


class Emit(StrEnum):
    """The launcher whose configuration file is printed."""

    accelerate = "accelerate"


class Precision(StrEnum):
    """The dtype of the layers' matrix multiplications."""

    bf16 = "bf16"
    fp8 = "fp8"
    fp4 = "fp4"


def plan(
    model: Annotated[
        Path | None,
        typer.Option(
            help="transformers config.json, a directory that holds one, or the id of a Hub model whose config is in "
            "the local cache; no weights are read. Required.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Number of devices in the cluster (default: 8, or as many as --profile measured). Several numbers, "
            "as in 64,128,256, print a table of their best plans with the efficiency of scaling.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            help="Number of devices per node (default: 8, or as many as --profile measured).", rich_help_panel=_JOB
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Device model, for example a100, h100, h200, b200, rtx-4090 or cpu (default: h100-sxm, or the "
            "device that --profile measured).",
            rich_help_panel=_JOB,
        ),
    ] = None,
    seq_len: Annotated[
        str,
        typer.Option(
            metavar="N[,N...]", help="Tokens per sequence. Several numbers print a table.", rich_help_panel=_JOB
        ),
    ] = "4096",
    global_batch: Annotated[
        str,
        typer.Option(
            metavar="N[,N...]",
            help="Sequences per optimizer step, over all devices. Several numbers print a table.",
            rich_help_panel=_JOB,
        ),
    ] = "64",
    precision: Annotated[
        Precision, typer.Option(help="Dtype of the layers' matrix multiplications.", rich_help_panel=_JOB)
    ] = Precision.bf16,
    gather_logits: Annotated[
        bool,
        typer.Option(
            "--gather-logits",
            help="Count the memory of whole logits, as with ToDistributedConfig(gather_logits=True): for a program "
            "that reads outputs.logits in training, as TRL's trainers do.",
            rich_help_panel=_JOB,
        ),
    ] = False,
    interconnect: Annotated[
        str | None,
        typer.Option(
            metavar="GBPS[,GBPS...]",
            help="Bandwidth from one device to other nodes, in Gb/s (default: that of the system in which the device "
            "is usually sold, or what --profile measured). Several numbers print a table.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    memory: Annotated[
        float, typer.Option(help="Share of the device memory that a plan may fill, up to 1.", rich_help_panel=_JOB)
    ] = 0.9,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Profile that meshwright calibrate wrote (default: data sheets and typical efficiencies).",
            rich_help_panel=_JOB,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Tokens of the whole run, for example 300B or 1.5T: also print its days, GPU-hours and cost.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(help="Price of one GPU-hour, in any currency; with --tokens.", rich_help_panel=_RUN),
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(
            help="Number of days for the whole run: print the smallest cluster that trains on --tokens in this time, "
            "in place of --gpus.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLAN",
            help='Plan in words, for example "dp8 tp2+sp zero1 mb1x4", or a file that --save wrote. Give --plan twice '
            "to compare two plans.",
            rich_help_panel=OWN_PLAN,
        ),
    ] = None,
    dp: Annotated[
        int | None,
        typer.Option(help="Data-parallel size (default: --gpus / the other sizes).", rich_help_panel=OWN_PLAN),
    ] = None,
    tp: TpSize = None,
    cp: CpSize = None,
    context: ContextMethod = None,
    ulysses: UlyssesSize = None,
    pp: PpSize = None,
    schedule: PipelineSchedule = None,
    sequence_parallel: SequenceParallel = None,
    zero_stage: ZeroStage = None,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Sequences per rank and micro-batch (default: all sequences of the rank).", rich_help_panel=OWN_PLAN
        ),
    ] = None,
    recompute: RecomputeKind = None,
    recomputed_layers: RecomputedLayers = None,
    top: Annotated[int, typer.Option(help="Number of plans to show.", rich_help_panel=_OUTPUT)] = 5,
    allow_future: Annotated[
        bool,
        typer.Option(
            "--allow-future",
            help="Also show plans that this version cannot run yet, such as recompute of attention alone.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the whole answer as JSON.", rich_help_panel=_OUTPUT)
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Write the first plan to this YAML file, for meshwright launch --plan.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write the answer to this HTML file: diagrams, a table of plans, and sliders for the job.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    emit: Annotated[
        Emit | None,
        typer.Option(
            help="Print a configuration file for accelerate launch instead of the answer.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Also run a step of the first plan on fake tensors and ranks, and compare its memory and collectives "
            "with the estimates.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    stage: Annotated[
        int | None,
        typer.Option(
            help="With --trace, rank of the pipeline to trace (default: the one that needs the most memory).",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    validate: InCheckout = None,
    calibrate_rows: InCheckout = None,
    seed: InCheckout = None,
    leave_out: InCheckout = None,
) -> None:
    """Find the fastest plans to train a model on a cluster, and what the training costs.

    Prints their time and memory, and why other plans were not chosen. Needs no GPU, no cluster and no weights, and
    downloads nothing.

    A plan is a split of the devices over data (dp), tensor (tp), pipeline (pp) and context (cp) parallelism, a ZeRO
    stage, a micro-batch size, and a choice of layers that backward recomputes. It is printed in words:
    "dp32 tp2+sp zero1 mb1x16" means 32 data-parallel x 2 tensor-parallel ranks with sequence parallelism (sp), ZeRO
    stage 1, and 16 micro-batches of 1 sequence per step.

    For example, the fastest plans, what a run costs, how it scales, and the smallest cluster for two weeks:

    \b
      meshwright plan --model config.json --gpus 64 --gpu h100 --seq-len 8192 --global-batch 512
      meshwright plan --model config.json --gpus 64 --global-batch 512 --tokens 1T --price 2.5
      meshwright plan --model config.json --gpus 64,128,256,512 --global-batch 512
      meshwright plan --model config.json --tokens 1T --days 14 --global-batch 512

    A plan of your own, two plans side by side, and what to run next:

    \b
      meshwright plan --model config.json --tp 2 --dp 8 --zero-stage 1
      meshwright plan --model config.json --plan "dp16 zero1 mb1x4" --plan "dp16 zero3 mb1x4"
      meshwright plan --model config.json --gpus 8 --save plan.yaml --emit accelerate > accelerate.yaml

    The exit code is 0; 1 if a plan of your own does not fit; and 2 if an argument is wrong or no plan fits.
    """
    sizes = given_sizes(
        dp=dp, tp=tp, cp=cp, context=context, ulysses=ulysses, pp=pp, schedule=schedule,
        sequence_parallel=sequence_parallel, zero_stage=zero_stage, micro_batch_size=micro_batch_size,
        recompute=recompute, recomputed_layers=recomputed_layers,
    )  # fmt: skip
    try:
        if model is None:
            raise ValueError("--model is missing; write --model config.json")
        if not 0 < memory <= 1:
            raise ValueError(f"--memory={memory} must be a share of the device's memory, above 0 and at most 1")
        if top < 1:
            raise ValueError(f"--top={top} must be at least 1")
        # Imported here so that --help is fast.
        from meshwright.cli import plan_answers, plan_inputs

        outputs = plan_answers.Outputs(
            json=json, save=save, html=html, emit=emit and emit.value, trace=trace, stage=stage, model=model
        )
        values: dict[str, tuple[Any, ...]] = {
            "gpus": plan_inputs.numbers("--gpus", gpus, int),
            "seq_len": plan_inputs.numbers("--seq-len", seq_len, int),
            "global_batch": plan_inputs.numbers("--global-batch", global_batch, int),
            "interconnect": plan_inputs.numbers("--interconnect", interconnect, float),
        }
        swept = plan_inputs.swept(values)
        if (own := bool(plan or sizes)) and (swept or days is not None):
            raise ValueError(
                f"a plan of your own is estimated for one setting; leave out the plan, or "
                f"{'--days' if swept is None else 'all but one value of --' + swept.replace('_', '-')}"
            )
        if days is not None and gpus is not None:
            raise ValueError("--days finds the number of devices, and --gpus gives it; leave one of them out")
        first: dict[str, Any] = {name: found[0] if found else None for name, found in values.items()}
        plans = None
        if own:
            first["gpus"], plans = plan_inputs.own_plans(plan or [], sizes, first["gpus"])
        question = plan_inputs.question(
            model,
            plan_inputs.Settings(
                **first,
                gpus_per_node=gpus_per_node,
                gpu=gpu,
                precision=precision.value,
                logits="gathered" if gather_logits else "chunked",
                profile_path=profile,
            ),
            memory=memory, top=top, allow_future=allow_future, tokens=tokens, price=price,
        )  # fmt: skip
        if plans is not None:
            sys.exit(0 if plan_answers.answer_own(question, outputs, plans) else 1)
        if days is not None:
            plan_answers.answer_days(question, outputs, days)
        elif swept is not None:
            plan_answers.answer_sweep(question, outputs, swept, values[swept])
        else:
            plan_answers.answer_search(question, outputs)
    except ValueError as error:
        typer.echo(f"meshwright plan: {error}", err=True)
        sys.exit(2)
