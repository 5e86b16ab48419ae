"""``meshwright report``: the logs of runs as one HTML page with plots."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from meshwright_tools.cli.command import check_pages, failures_of, say


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folder that was passed as logging_dir, or of a Trainer, or with TensorBoard's files; or a folder of "
            "such folders.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="HTML file to write (default: report.html in the folder of the first run).")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a page that follows the runs, on this machine only, instead.")
    ] = False,
    port: Annotated[int, typer.Option(help="Port of --serve; 0 takes a free one.")] = 0,
    every: Annotated[float, typer.Option(help="Seconds between two readings of the logs with --serve.")] = 2.0,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and write no file.")] = False,
) -> None:
    """Show runs on one HTML page with plots.

    The page shows loss and evaluation loss, gradient norm, learning rate, throughput, memory and time of each rank, the
    parts of a step, waiting for data, faults, restarts, and the planner's estimate beside what was measured. A reader
    can zoom, smooth and compare several runs. The page loads nothing from the network. The command also works while the
    run goes on, and if the last line of its log was cut off.

    For example:

    \b
      meshwright report runs/first
      meshwright report runs/first runs/second --output both.html
      meshwright report runs --serve
    """
    with failures_of("report", json=json):
        check_pages()
        # Imported here so that --help is fast.
        from meshwright.errors import PlanError
        from meshwright_tools.report.report import figures_of, write_report

        if serve + json + (output is not None) > 1:
            raise PlanError("--output, --serve and --json each say where the runs are shown; give one of them")
        if json:
            say(figures_of(runs))
        elif serve:
            _serve(runs, port, every)
        else:
            path = output or (runs[0] if runs[0].is_dir() else runs[0].parent) / "report.html"
            write_report(runs, path)
            say(f"wrote {path}")


def _serve(runs: list[Path], port: int, every: float) -> None:
    from meshwright.errors import PlanError
    from meshwright_tools.report.report import ReportServer

    if not 0 < every < math.inf:
        raise PlanError(f"--every {every:g} must be a number of seconds above 0")
    with ReportServer(runs, port=port, every=every) as server:
        say(f"{server.address} shows the runs; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
