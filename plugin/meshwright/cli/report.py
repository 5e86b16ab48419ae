"""``meshwright report``: the log of a run as one page with plots."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.pages import check_pages


def report(
    run: Annotated[Path, typer.Argument(help="Folder that was passed as logging_dir, or the meshwright.jsonl in it.")],
    output: Annotated[
        Path | None, typer.Option(help="HTML file to write (default: report.html beside the log).")
    ] = None,
) -> None:
    """Write the log of a run as one HTML page with plots.

    The page shows loss, gradient norm, throughput, memory of each rank, the parts of a step, the slowest ranks, faults,
    and the planner's estimate beside what was measured. It loads nothing from the network. The command also works while
    the run goes on, and if the last line of its log was cut off.

    For example:

    \b
      meshwright report runs/first
      meshwright report runs/first --output first.html
    """
    try:
        check_pages()
        # Imported here so that --help is fast.
        from meshwright.monitor.report import write_report

        path = output or (run if run.is_dir() else run.parent) / "report.html"
        write_report(run, path)
        typer.echo(f"wrote {path}")
    except ValueError as error:
        typer.echo(f"meshwright report: {error}", err=True)
        sys.exit(2)
