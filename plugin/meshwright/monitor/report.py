"""The page of ``meshwright report``: the logs of runs with plots that a reader can zoom, smooth and compare."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from meshwright.monitor import report_tables as tables
from meshwright.monitor.report_data import report_data
from meshwright.monitor.run_folders import LoggedRun, find_runs
from meshwright.monitor.still_plots import still_plots
from meshwright.planner.page.render import as_script, fragment, render
from meshwright.whole_file import write_whole

_PAGE = Path(__file__).with_name("page")
_SCRIPTS = ("chart", "report")
RunPath = str | os.PathLike[str]


def _chart(ident: str, title: str, unit: str, words: str, *lines: tuple[str, ...], **more: Any) -> dict[str, Any]:
    """Return a chart: its lines as (column, label), and ``part`` for a band's colour."""
    return {"id": ident, "title": title, "unit": unit, "words": words, "lines": lines or ((ident, title),), **more}


_CHARTS = (
    _chart(
        "loss", "Loss", "number", "The loss of each line's step; dots are evaluations.", ("loss", "training"),
        values=r"^eval.*loss$",
    ),
    _chart("norm", "Gradient norm", "number", "The global norm before clipping.", zero=True),
    _chart("lr", "Learning rate", "number", "That of the optimizer's first group.", exact=True),
    _chart("tokens_per_second", "Tokens per second", "count", "Over all ranks, from line to line.", zero=True),
    _chart("mfu", "MFU", "percent", "Model FLOPs by the peak of all devices.", zero=True),
    _chart(
        "seconds_per_step", "Seconds per step", "seconds", "Measured, beside the planner's estimate and its band.",
        zero=True, estimate="seconds",
    ),
    _chart(
        "parts", "Time of a step by part", "seconds",
        "Backward includes the reduction of gradients and clipping. Between is the loader, logging, evaluation, saves.",
        ("part/forward", "forward", "forward"), ("part/backward", "backward", "backward"),
        ("part/optimizer", "optimizer", "optimizer"), ("part/between", "between", "bubble"), bands=True, zero=True,
    ),
    _chart("memory", "Memory of each rank", "gib", "The largest memory so far.", ("memory", "fullest rank"),
           exact=True, ranks=True, estimate="memory"),
    _chart("busy", "Time of each rank", "seconds", "Seconds per step in which a rank did not wait for other ranks.",
           ("busy", "slowest rank"), ranks=True),
    _chart("behind", "Slowest rank", "seconds", "Seconds per step by which the others wait for the slowest rank.",
           zero=True),
    _chart("read", "Waiting for data", "seconds", "Seconds per step in which a rank waited for its loader.",
           ("read", "slowest loader"), zero=True, ranks=True),
    _chart("experts", "Load of experts", "number", "The fullest expert, and rank of experts, relative to the mean.",
           ("expert_load", "fullest expert"), ("rank_load", "fullest rank")),
)  # fmt: skip


def report(*paths: RunPath) -> str:
    """Return the page of runs, which loads nothing from elsewhere.

    Args:
        paths: for each run, the folder of its log, of a Trainer or of TensorBoard's files; or a folder of such folders.

    Raises:
        PlanError: if there is no log, or it has no record.
    """
    return page_of(find_runs(paths))


def page_of(runs: Sequence[LoggedRun], *, live: float | None = None) -> str:
    """Return the page of runs.

    Args:
        runs: the runs.
        live: seconds after which the page asks its server for news; None for a page without a server.
    """
    return render(
        _PAGE / "report.html.j2",
        own_style=(_PAGE / "report.css").read_text(encoding="utf-8"),
        header=tables.header(runs),
        runs=runs,
        plots=still_plots(runs[-1].records),
        details=_details(runs),
        data=Markup(as_script(_drawn(runs, live))),
        script=Markup(_script()),
        live=live,
        footer=tables.footer(runs),
    )


def news_of(runs: Sequence[LoggedRun], *, live: float) -> dict[str, Any]:
    """Return what an open page asks for: the figures, the tiles and the tables of now."""
    return {
        **_drawn(runs, live),
        "tiles": fragment(_PAGE / "tiles.html.j2", tiles=tables.header(runs)["tiles"]),
        "details": _details(runs),
    }


def figures_of(paths: Sequence[RunPath]) -> str:
    """Return the figures of runs as JSON."""
    return json.dumps({"runs": report_data(find_runs(paths))}, indent=2)


def write_report(runs: Sequence[RunPath] | RunPath, path: RunPath) -> None:
    """Write the page of runs atomically.

    Raises:
        PlanError: as ``report``; or if the file cannot be written.
    """
    paths = [runs] if isinstance(runs, str | os.PathLike) else runs
    write_whole(path, report(*paths), option="--output")


def _drawn(runs: Sequence[LoggedRun], live: float | None) -> dict[str, Any]:
    return {"runs": report_data(runs), "charts": _CHARTS, "live": live}


def _details(runs: Sequence[LoggedRun]) -> Markup:
    return fragment(
        _PAGE / "details.html.j2",
        estimates=tables.estimates(runs),
        stragglers=tables.stragglers(runs),
        events=tables.events(runs),
        faults=tables.faults(runs),
        facts=tables.facts(runs),
    )


def _script() -> str:
    """Return the page's JavaScript as one function, so that it adds no global name."""
    files = "".join((_PAGE / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    assert "]]>" not in files and "</script" not in files
    return f'(() => {{\n"use strict";\n{files}}})();\n'
