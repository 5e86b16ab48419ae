"""Options that several commands have."""

from __future__ import annotations

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
