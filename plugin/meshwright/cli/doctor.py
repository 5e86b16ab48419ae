"""``meshwright doctor``: what is installed, and what works on this machine."""

from __future__ import annotations

import importlib
import json as json_format
import sys
from typing import Annotated

import typer


def doctor(json: Annotated[bool, typer.Option(help="Print the findings as JSON.")] = False) -> None:
    """Look at what is installed and what works on this machine; exit code 1 if training would fail.

    Versions of torch, transformers, accelerate, datasets, DeepSpeed, PEFT and TRL beside those that are tested, GPUs
    and NCCL, gloo (tried), the network, cores and memory. Changes nothing.

    For example:

      meshwright doctor

      meshwright doctor --json | jq .problem
    """
    # By name: the core works without the Hugging Face stack, which this asks after.
    examiner = importlib.import_module("meshwright_hf.doctor")
    findings = examiner.examine()
    if json:
        typer.echo(json_format.dumps(examiner.as_dict(findings), indent=2))
    else:
        typer.echo(examiner.as_text(findings))
    sys.exit(1 if examiner.has_problem(findings) else 0)
