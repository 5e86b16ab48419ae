"""The command line: ``meshwright plan``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train stock Hugging Face models in parallel with one call.",
)


@app.callback()
def _commands() -> None:
    """Keeps ``plan`` a command of its own while it is the only one."""


@app.command()
def plan(
    validate: Annotated[
        Optional[Path], typer.Option(help="Hold the estimator against measured runs in this CSV file.")  # noqa: UP045
    ] = None,
    calibrate_rows: Annotated[int, typer.Option(help="With --validate: fit to so many runs of each source.")] = 0,
    seed: Annotated[int, typer.Option(help="With --validate: of the draw of those runs.")] = 0,
    leave_out: Annotated[
        str, typer.Option(help="With --validate: score other 'rows', other 'model's, or larger 'gpus' counts.")
    ] = "rows",
) -> None:
    """Choose a parallel plan, and say why and what it costs."""
    try:
        if validate is not None:
            from meshwright.planner.report import validation_table
            from meshwright.planner.runs import read_runs
            from meshwright.planner.validate import validate as score

            scores = score(read_runs(validate), calibrate_rows=calibrate_rows, seed=seed, leave=leave_out)
            typer.echo(validation_table(scores))
            return
    except ValueError as error:
        typer.echo(f"meshwright plan: {error}", err=True)
        sys.exit(2)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
