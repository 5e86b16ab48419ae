"""The command line, one module per command. None imports torch before its command runs, so --help is fast."""

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
# Everything after the script's name goes to the script, even what looks like an option of launch.
app.command(context_settings={"allow_interspersed_args": False})(launch.launch)
app.command()(verify.verify)
app.command()(doctor.doctor)
app.command()(calibrate.calibrate)


def main() -> None:
    """Run the command line."""
    app()
