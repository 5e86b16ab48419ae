"""The command line: a module a command. None imports torch before its command runs, so that --help does not wait."""

from __future__ import annotations

import typer

from meshwright.cli import calibrate, doctor, launch, plan, verify

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train stock Hugging Face models in parallel with one call.",
)
app.command()(plan.plan)
# What follows the script's name is the script's, also what looks like an option of ours.
app.command(context_settings={"allow_interspersed_args": False})(launch.launch)
app.command()(verify.verify)
app.command()(doctor.doctor)
app.command()(calibrate.calibrate)


def main() -> None:
    """Run the command line."""
    app()
