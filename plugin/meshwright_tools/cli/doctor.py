"""``meshwright doctor``: checks what is installed and what works on this machine."""

from __future__ import annotations

import json as json_format
import sys
from typing import Annotated

import typer

from meshwright_tools.cli.command import say


def doctor(json: Annotated[bool, typer.Option(help="Print the findings as JSON.")] = False) -> None:
    """Check what is installed and what works on this machine.

    Prints the installed versions of torch, transformers, accelerate, datasets, DeepSpeed, PEFT and TRL, each with its
    tested versions. Also prints the GPUs, NCCL, whether two ranks can connect over gloo (by opening a test connection),
    the network, the cores and the memory. Changes nothing. The exit code is 1 if training would fail on this machine,
    otherwise 0.

    For example:

    \b
      meshwright doctor
      meshwright doctor --json | jq .problem
    """
    from meshwright_tools import doctor as examiner  # here, since its versions take a second to import

    findings = examiner.examine()
    if json:
        say(json_format.dumps(examiner.as_dict(findings), indent=2))
    else:
        say(examiner.as_text(findings))
    sys.exit(1 if examiner.has_problem(findings) else 0)
