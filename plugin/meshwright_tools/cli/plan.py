"""``meshwright plan`` finds the fastest plans, ``plan weigh`` estimates others, ``plan sweep`` compares settings."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from meshwright.errors import PlanError
from meshwright_tools.cli.command import (
    HIDDEN,
    GroupedCommand,
    GroupedCommands,
    PlanSizes,
    failures_of,
    say,
    takes_options,
)
from meshwright_tools.cli.plan_answers import (
    Outputs,
    PageOutputs,
    TableOutputs,
    answer_days,
    answer_own,
    answer_search,
    answer_sweep,
)
from meshwright_tools.cli.plan_inputs import RUN_PANEL, JobOptions, PlanQuestion, RunOptions, SearchOptions, own_plans

app = typer.Typer(cls=GroupedCommands, invoke_without_command=True, rich_markup_mode=None)

_OwnPlans = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PLAN",
        help='Plan in words, for example "dp8 tp2+sp zero1 mb1x4", or a file that --save wrote. Give --plan twice to '
        "compare two plans.",
        rich_help_panel="A plan of your own",
    ),
]
_Days = Annotated[
    float | None,
    typer.Option(
        help="Number of days for the whole run: print the smallest cluster that trains on --tokens in this time, in "
        "place of --gpus.",
        rich_help_panel=RUN_PANEL,
    ),
]


def _refuse(value: str | None) -> None:
    if value is not None:
        command = "python -m benchmarks.published_runs runs.csv"
        say(f"meshwright plan: measured runs are compared in a checkout of Meshwright: {command}", err=True)
        raise typer.Exit(2)


_Removed = typer.Option("--validate", "--calibrate-rows", "--seed", "--leave-out", hidden=True, callback=_refuse)


@app.callback()
@takes_options
def plan(
    *,
    ctx: typer.Context,
    job: JobOptions,
    run: RunOptions,
    search: SearchOptions,
    outputs: PageOutputs,
    plan: Annotated[_OwnPlans, HIDDEN] = None,
    sizes: Annotated[PlanSizes, HIDDEN],
    days: Annotated[_Days, HIDDEN] = None,
    removed: Annotated[str | None, _Removed] = None,
) -> None:
    """Find the fastest plans to train a model on a cluster, and what the training costs.

    Prints their time and memory, and why other plans were not chosen. Needs no GPU, no cluster and no weights, and
    downloads nothing.

    A plan is a split of the devices over data (dp), tensor (tp), pipeline (pp) and context (cp) parallelism, a ZeRO
    stage, a micro-batch size, and a choice of layers that backward recomputes. It is printed in words:
    "dp32 tp2+sp zero1 mb1x16" means 32 data-parallel x 2 tensor-parallel ranks with sequence parallelism (sp), ZeRO
    stage 1, and 16 micro-batches of 1 sequence per step.

    For example, the fastest plans, what a run costs, and what to run next:

    \b
      meshwright plan --model config.json --gpus 64 --gpu h100 --seq-len 8192 --global-batch 512
      meshwright plan --model config.json --gpus 64 --global-batch 512 --tokens 1T --price 2.5
      meshwright plan --model config.json --gpus 8 --save plan.yaml --emit accelerate > accelerate.yaml

    plan weigh estimates plans of your own, and plan sweep compares settings or finds the smallest cluster.

    The exit code is 0, or 2 if an argument is wrong or no plan fits.
    """
    with failures_of("plan", json=outputs.json):
        if ctx.invoked_subcommand is not None:
            _check_order(ctx)
            return
        question = job.question(run, search)
        if plan or sizes.given:
            _weigh(question, outputs, plan or [], sizes, days)
        elif days is None and (question.settings.is_of_page if outputs.html else question.settings.swept is None):
            answer_search(question, outputs)
        else:
            _sweep(question, outputs, days)


@app.command(cls=GroupedCommand)
@takes_options
def weigh(*, job: JobOptions, run: RunOptions, plan: _OwnPlans = None, sizes: PlanSizes, outputs: Outputs) -> None:
    """Estimate the time and memory of plans of your own, whether they fit or not.

    Prints where time and memory go, and how far the first plan is from the fastest one. Give plans in words, or one
    plan by its sizes.

    For example, one plan, and two side by side:

    \b
      meshwright plan weigh --model config.json --tp 2 --dp 8 --zero-stage 1
      meshwright plan weigh --model config.json --plan "dp16 zero1 mb1x4" --plan "dp16 zero3 mb1x4"

    The exit code is 0; 1 if the first plan does not fit; and 2 if an argument is wrong.
    """
    with failures_of("plan weigh", json=outputs.json):
        if not plan and not sizes.given:
            raise PlanError('no plan is given; write --plan "dp8 zero1", or sizes such as --dp 8')
        _weigh(job.question(run, SearchOptions()), outputs, plan or [], sizes, None)


@app.command(cls=GroupedCommand)
@takes_options
def sweep(*, job: JobOptions, run: RunOptions, days: _Days = None, outputs: TableOutputs) -> None:
    """Compare the best plans for several values of one setting, or find the smallest cluster for a number of days.

    --gpus, --gpu, --precision, --seq-len, --global-batch or --interconnect takes several values, separated by commas.

    For example, how a run scales, and the smallest cluster for two weeks:

    \b
      meshwright plan sweep --model config.json --gpus 64,128,256,512 --global-batch 512
      meshwright plan sweep --model config.json --tokens 1T --days 14 --global-batch 512

    The exit code is 0, or 2 if an argument is wrong or no plan fits.
    """
    with failures_of("plan sweep", json=outputs.json):
        _sweep(job.question(run, SearchOptions()), outputs, days)


def _check_order(ctx: typer.Context) -> None:
    """Raise a PlanError if an option stands before the name of a command, which would not see it."""
    for name in ctx.params:
        if (source := ctx.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
            raise PlanError(
                f"write --{name.replace('_', '-')} after {ctx.invoked_subcommand}, which has its own options"
            )


def _weigh(
    question: PlanQuestion, outputs: Outputs, words: Sequence[str], sizes: PlanSizes, days: float | None
) -> None:
    settings = question.settings
    if settings.swept is not None or days is not None:
        several = "--days" if settings.swept is None else f"all but one value of --{settings.swept.replace('_', '-')}"
        raise PlanError(f"a plan of your own is estimated for one setting; leave out the plan, or {several}")
    gpus, plans = own_plans(words, sizes.given, settings.gpus[0] if settings.gpus else None)
    settings = dataclasses.replace(settings, gpus=() if gpus is None else (gpus,))
    sys.exit(0 if answer_own(dataclasses.replace(question, settings=settings), outputs, plans) else 1)


def _sweep(question: PlanQuestion, outputs: TableOutputs, days: float | None) -> None:
    swept = question.settings.swept
    if days is None and swept is None:
        raise PlanError("every setting has one value; write several, as in --gpus 64,128,256, or --days 14")
    if days is None:
        answer_sweep(question, outputs, str(swept))
    elif swept is not None:
        raise PlanError(f"--days compares sizes of the cluster; give one value of --{swept.replace('_', '-')}")
    elif question.settings.gpus:
        raise PlanError("--days finds the number of devices, and --gpus gives it; leave one of them out")
    else:
        answer_days(question, outputs, days)
