"""The page of ``meshwright report``, and its server for runs that go on.

Still pictures of a run do not need the page's script: they are for paper, and for readers who turn scripts off.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from markupsafe import Markup

from meshwright.errors import PlanError
from meshwright.monitor.figures import PARTS
from meshwright.monitor.records import RunRecords, number
from meshwright.outside_files import write_whole
from meshwright.printable import printable
from meshwright_plan.formatting import memory, seconds
from meshwright_tools.plan_page.render import Svg, as_script, fragment, render
from meshwright_tools.report import report_data as tables
from meshwright_tools.report.plots import COLOURS, Marks, Series, line_plot, parts_plot
from meshwright_tools.report.report_data import GIB, by_rank, estimated_memory, report_data, shown_ranks
from meshwright_tools.report.run_folders import LoggedRun, find_runs

_PAGE = Path(__file__).with_name("page")
_SCRIPTS = ("chart", "report")
RunPath = str | os.PathLike[str]
_HALF, _NARROW = 538, 336  # widths of pictures in pixels: half a page, and a phone
Draw = Callable[[float, str], Svg]


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


@dataclass(frozen=True)
class Plot:
    """A card with a picture and its legend, which is a list of (part of the palette, words)."""

    title: str
    words: str
    ident: str
    draw: Draw
    legend: Sequence[tuple[str, str]] = ()

    @property
    def picture(self) -> Markup:
        return Markup(self.draw(_HALF, self.ident))

    @property
    def narrow_picture(self) -> Markup:
        return Markup(self.draw(_NARROW, f"{self.ident}-narrow"))


def _points(found: RunRecords, name: str) -> list[tuple[float, float]]:
    pairs = ((float(step["step"]), number(step.get(name))) for step in found.steps)
    return [(x, y) for x, y in pairs if y is not None]


def still_plots(found: RunRecords) -> list[Plot]:
    """Return the pictures of a run."""
    run = found.runs[-1] if found.runs else {}
    starts = [(float(start["first_step"]), "resumed here") for start in found.runs if start["first_step"]]
    faults = [(float(fault["step"]), "fault") for fault in found.faults if number(fault.get("step")) is not None]
    marks = Marks(steps=[*starts, *faults])

    def plain(name: str, title: str, words: str, unit: Callable[[float], str], **options: Any) -> Plot:
        series = [Series(name=title, points=_points(found, name))]
        draw = functools.partial(line_plot, series, title=title, unit=unit, **{"marks": marks, **options})
        return Plot(title, words, name, draw)

    estimated = number(run.get("estimated_seconds"))
    levels = [(estimated, f"estimated {seconds(estimated)}")] if estimated else []
    return [
        plain("loss", "Loss", "The loss of the step of each line.", "{:.4g}".format, from_zero=False),
        plain("norm", "Gradient norm", "The global norm before clipping.", "{:.3g}".format),
        plain("tokens_per_second", "Tokens per second", "Over all ranks, from line to line.", _thousands),
        plain(
            "seconds_per_step", "Seconds per step", "Measured, beside the planner's estimate.", seconds,
            marks=Marks(levels=levels, steps=marks.steps),
        ),
        _memory(found, run),
        _parts(found),
        plain(
            "behind", "Slowest rank", "Seconds per step by which the others wait for the slowest rank.", seconds
        ),
        plain("lr", "Learning rate", "That of the optimizer's first group.", "{:.2g}".format),
    ]  # fmt: skip


def _thousands(value: float) -> str:
    return f"{value / 1e6:,.3g} M" if value >= 1e6 else f"{value / 1e3:,.3g} k" if value >= 1e4 else f"{value:,.3g}"


def _memory(found: RunRecords, run: Mapping[str, Any]) -> Plot:
    points: dict[int, list[tuple[float, float]]] = {}
    for step in found.steps:
        for rank, value in by_rank(step, "peak").items():
            points.setdefault(rank, []).append((float(step["step"]), value / GIB))
    shown = shown_ranks({rank: values[-1][1] for rank, values in points.items()})
    series = [
        Series(name=f"rank {rank}", points=points[rank], kind="front" if rank == shown[0] else "series")
        for rank in reversed(shown)
    ]
    estimated = estimated_memory(run)
    levels = [] if estimated is None else [(estimated / GIB, f"estimated {memory(estimated)}")]
    is_host = run.get("memory_is") == "resident"
    words = "The largest memory of each rank so far: " + (
        "resident memory of the process, which includes its libraries." if is_host else "what torch had allocated."
    )
    draw = functools.partial(
        line_plot, series, title="Memory of each rank", unit="{:.3g} GiB".format, marks=Marks(levels=levels)
    )
    return Plot("Memory of each rank", f"{words} The thick line is the fullest rank.", "memory", draw)


def _parts(found: RunRecords) -> Plot:
    steps = []
    for step in found.steps[1:] or found.steps:
        if parts := step.get("parts"):
            steps.append((float(step["step"]), {name: number(parts.get(name)) or 0.0 for name in PARTS}))
    words = (
        "Backward is everything from the end of forward to the optimizer: gradients, their reduction, clipping. "
        "Between is what lies between two steps: the loader, logging, evaluation, saves."
    )
    draw = functools.partial(parts_plot, steps, unit=seconds)
    return Plot("Time of a step by part", words, "parts", draw, [(COLOURS[name], name) for name in PARTS])


_HOST = "127.0.0.1"


class ReportServer(ThreadingHTTPServer):
    """A server on this machine's loopback interface whose page follows the runs.

    Args:
        paths: the runs, as for ``report``; they are read again at each request.
        port: the port; 0 takes a free one.
        every: seconds between two questions of an open page.

    Raises:
        PlanError: if there is no log, or the port is taken.
    """

    daemon_threads = True

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, port: int = 0, every: float = 2.0):
        self.paths, self.every = paths, every
        find_runs(paths)
        try:
            super().__init__((_HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise PlanError(
                f"--port {port} cannot be used ({error}); choose another, or leave --port out to take a free one"
            ) from None

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{_HOST}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 30.0  # seconds without a word, after which a connection is closed

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{_HOST}:{port}", f"localhost:{port}"):
            # A page of another site whose name leads to this address must not read the runs.
            self._answer(403, "text/plain", f"open {self.server.address} instead")
        elif self.path.partition("?")[0] == "/":
            self._answer_from("text/html", lambda runs: page_of(runs, live=self.server.every))
        elif self.path.partition("?")[0] == "/data.json":
            self._answer_from("application/json", lambda runs: json.dumps(news_of(runs, live=self.server.every)))
        else:
            self._answer(404, "text/plain", f"there is only {self.server.address}")

    def _answer_from(self, kind: str, content: Callable[[Sequence[LoggedRun]], str]) -> None:
        try:
            text = content(find_runs(self.server.paths))
        except PlanError as error:  # for example a log that was removed meanwhile
            self._answer(500, "text/plain", str(error))
        except Exception as error:  # a reader of the page gets a sentence, whatever the logs hold
            why = printable(f"{type(error).__name__}: {error}"[:300])
            self._answer(500, "text/plain", f"the logs of these runs cannot be shown: {why}")
        else:
            self._answer(200, kind, text)

    def _answer(self, status: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        with contextlib.suppress(ConnectionError):  # the reader has closed the page meanwhile
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for a request."""
