"""Options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

ModelConfig = Annotated[
    Path, typer.Option(help="transformers config.json, or a directory that holds one; no weights are read.")
]
PlanWords = Annotated[
    str,
    typer.Option(help='Plan in words, for example "dp2 tp2+sp zero1", or a file that meshwright plan --save wrote.'),
]


class Recompute(StrEnum):
    """Which layers backward recomputes."""

    none = "none"
    full = "full"


class Schedule(StrEnum):
    """The schedules of a pipeline, which are those of ``meshwright.plan.schedule``."""

    gpipe = "gpipe"
    one_forward_one_backward = "1f1b"
    interleaved = "interleaved"
    zero_bubble_h1 = "zb-h1"
    zero_bubble_v = "zbv"


class Context(StrEnum):
    """The methods of context parallelism, which are those of ``meshwright.plan.context_methods``."""

    gather = "gather"
    ulysses = "ulysses"
    ring = "ring"
    hybrid = "hybrid"


def _refuse(value: str | None) -> None:
    if value is not None:
        command = "python -m benchmarks.published_runs runs.csv"
        typer.echo(f"meshwright plan: measured runs are compared in a checkout of Meshwright: {command}", err=True)
        raise typer.Exit(2)


InCheckout = Annotated[str | None, typer.Option(hidden=True, callback=_refuse)]  # options of earlier versions

OWN_PLAN = "A plan of your own, which is estimated instead of searching"  # the group of these options in plan's help
_option = partial(typer.Option, rich_help_panel=OWN_PLAN)

TpSize = Annotated[int | None, _option(help="Tensor-parallel size (default: 1).")]
CpSize = Annotated[int | None, _option(help="Context-parallel size: ranks that share each sequence (default: 1).")]
ContextMethod = Annotated[
    Context | None, _option(help="With --cp, method by which attention reaches the whole sequence (default: gather).")
]
UlyssesSize = Annotated[
    int | None, _option(help="With --context hybrid, number of neighbouring ranks that exchange heads.")
]
PpSize = Annotated[int | None, _option(help="Pipeline-parallel size: ranks that share the layers (default: 1).")]
PipelineSchedule = Annotated[
    Schedule | None, _option(help="With --pp, the order of forwards and backwards (default: 1f1b).")
]
SequenceParallel = Annotated[
    bool | None,
    _option(
        "--sequence-parallel/--no-sequence-parallel",
        help="With --tp, also shard the activations between blocks over tp (default: no).",
    ),
]
ZeroStage = Annotated[
    int | None,
    _option(help="ZeRO stage over dp: 1 shards the optimizer state, 2 gradients too, 3 parameters too (default: 0)."),
]
RecomputeKind = Annotated[
    Recompute | None, _option(help="What backward recomputes: no layers, or whole layers (default: none).")
]
RecomputedLayers = Annotated[
    int | None,
    _option(help="With --recompute full, number of layers of each rank to recompute (default: all of them)."),
]


def given_sizes(**sizes: Any) -> dict[str, Any]:
    """Return the fields of ``ParallelPlan`` that were given, with enums as their values."""
    given = {name: value for name, value in sizes.items() if value is not None}
    return {name: value.value if isinstance(value, StrEnum) else value for name, value in given.items()}
