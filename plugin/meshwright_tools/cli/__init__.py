"""The command line, one module per command. No module imports torch before its command runs, so --help is fast.

plan.py, launch.py, verify.py, trace_cuda.py, doctor.py, calibrate.py, inspect.py, export.py, report.py
plan_inputs.py    what ``plan`` reads: the cluster, the job, the user's own plans
plan_settings.py  settings that may have several values
plan_answers.py   what ``plan`` prints
command.py        what all commands share
__main__.py       ``python -m meshwright_tools.cli``
"""

from __future__ import annotations

import itertools
import sys
from typing import Annotated

import typer

from meshwright import __version__
from meshwright_tools.cli import calibrate, doctor, export, launch, plan, trace_cuda, verify
from meshwright_tools.cli.command import Command, run_with_json_errors, say
from meshwright_tools.cli.inspect import inspect
from meshwright_tools.cli.report import report

app = typer.Typer(
    context_settings={"token_normalize_func": lambda word: word.replace("_", "-")},  # --seq_len is --seq-len
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(plan.app, name="plan")
# Everything after the script's name goes to the script, even what looks like an option of launch.
app.command(cls=Command, context_settings={"allow_interspersed_args": False})(launch.launch)
app.command()(verify.verify)
app.command()(trace_cuda.trace_cuda)
app.command()(doctor.doctor)
app.command()(calibrate.calibrate)
app.command()(inspect)
app.command()(export.export)
app.command(cls=Command)(report)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        say(f"meshwright {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train stock Hugging Face models in parallel with one call."""


def _ends_options(word: str) -> bool:
    """Return whether what follows may be options of a script that is launched."""
    return word == "--" or (sys.argv[1] == "launch" and (word in ("-m", "--module") or word.endswith(".py")))


def main() -> None:
    """Run the command line."""
    if "--json" in itertools.takewhile(lambda word: not _ends_options(word), sys.argv[1:]):
        run_with_json_errors(app)
    app()
