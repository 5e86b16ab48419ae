"""Options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

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
    """The schedules of a pipeline, which are those of ``meshwright.pipeline.schedule``."""

    gpipe = "gpipe"
    one_forward_one_backward = "1f1b"
    interleaved = "interleaved"
    zero_bubble_h1 = "zb-h1"
    zero_bubble_v = "zbv"


class Context(StrEnum):
    """The methods of context parallelism, which are those of ``meshwright.context.methods``."""

    gather = "gather"
    ulysses = "ulysses"
    ring = "ring"
    hybrid = "hybrid"
