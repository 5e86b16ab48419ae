"""``meshwright report``: the log of a run as one HTML page with plots."""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from meshwright.errors import PlanError
from meshwright.monitor.figures import PARTS
from meshwright.monitor.line import clock
from meshwright.monitor.plots import COLOURS, Marks, Series, line_plot, parts_plot
from meshwright.monitor.records import RunRecords, read_records
from meshwright.planner.formatting import memory, seconds
from meshwright.planner.page.draw import Svg
from meshwright.planner.page.render import render, write_whole

_HALF, _NARROW = 538, 336  # widths of pictures in pixels: half a page, and a phone
_GIB = 2**30
_RANKS = 8  # ranks whose memory has a line of its own; of more ranks, the fullest and the emptiest have one
_STRAGGLERS = 8  # rows of the table of slow ranks
_STYLE = """
.series { fill: none; stroke-width: 1.5px; stroke: var(--dot); } .series-dot { fill: var(--dot); }
pre { overflow-x: auto; font-size: 12.5px; margin: 8px 0 0; white-space: pre-wrap; }
"""
Draw = Callable[[float, str], Svg]


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


def report(run: str | os.PathLike[str]) -> str:
    """Return a run's page, which loads nothing from elsewhere.

    Args:
        run: the folder that was passed as ``logging_dir``, or the file in it.

    Raises:
        PlanError: if there is no log, or it has no record.
    """
    found = read_records(run)
    return render(
        Path(__file__).with_name("report.html.j2"),
        own_style=_STYLE,
        header=_header(found),
        plots=_plots(found),
        stragglers=_stragglers(found),
        estimates=_estimates(found),
        faults=[(str(fault.get("step", "")), str(fault.get("what", ""))) for fault in found.faults],
        footer=_footer(found),
    )


def write_report(run: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write a run's page atomically.

    Raises:
        PlanError: as ``report``; or if the file cannot be written.
    """
    content, path = report(run), Path(path)
    try:
        write_whole(content, path, option="--output")
    except OSError as error:
        raise PlanError(f"--output {path} cannot be written ({error.strerror}); choose another file") from None


def _number(value: Any) -> float | None:
    """Return a number of the log; None if it is missing, and nan or inf for the strings that stand for them."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _points(found: RunRecords, name: str) -> list[tuple[float, float]]:
    pairs = ((float(step["step"]), _number(step.get(name))) for step in found.steps)
    return [(x, y) for x, y in pairs if y is not None]


def _header(found: RunRecords) -> dict[str, Any]:
    run = found.runs[-1] if found.runs else {}
    last = found.steps[-1] if found.steps else {}
    steps = f"{last.get('step', 0):,}" + (f" of {run['max_steps']:,}" if run.get("max_steps") else "")
    speeds, mfus = ([y for _, y in _points(found, name)[1:]] for name in ("tokens_per_second", "mfu"))
    speed = statistics.median_high(speeds) if speeds else _number(last.get("tokens_per_second"))
    peaks = _peaks(last)
    loss, left = _number(last.get("loss")), _number(last.get("left"))
    ranks, millions = run.get("ranks") or 1, (run.get("parameters") or 0) / 1e6
    tiles = [
        ("Step", steps, f"{clock(left)} left" if left else "the last line"),
        ("Loss", "unknown" if loss is None else f"{loss:.4f}", "of the last line"),
        ("Tokens/s", "unknown" if speed is None else f"{speed:,.0f}", ""
         if speed is None else f"median; {speed / ranks:,.0f} per device"),
        ("MFU", f"{statistics.median_high(mfus):.1%}" if mfus else "unknown", "median; model FLOPs / peak FLOPs"),
        ("Memory", memory(max(peaks.values())) if peaks else "unknown",
         f"rank {max(peaks, key=lambda rank: peaks[rank])}, the fullest" if peaks else ""),
    ]  # fmt: skip
    mesh = " \u00d7 ".join(f"{name}={size}" for name, size in (run.get("mesh") or {}).items() if size and size > 1)
    return {
        "name": str(run.get("model", "A run")),
        "job": f"{millions:,.6g} M parameters on {ranks} \u00d7 {run.get('device', 'unknown')}",
        "label": str(run.get("plan", "")),
        "why": "; ".join(filter(None, (mesh, str(run.get("why", ""))))),
        "tiles": tiles,
    }


def _peaks(step: Mapping[str, Any]) -> dict[int, float]:
    peaks = step.get("peak")
    items = peaks.items() if isinstance(peaks, Mapping) else ()
    return {int(rank): value for rank, text in items if (value := _number(text)) is not None}


def _estimated_memory(record: Mapping[str, Any]) -> float | None:
    """Return the estimated bytes of the fullest rank; None without an estimate."""
    stages = record.get("estimated_memory") or []
    return max((sum(filter(None, map(_number, parts.values()))) for parts in stages), default=None)


def _plots(found: RunRecords) -> list[Plot]:
    run = found.runs[-1] if found.runs else {}
    starts = [(float(start["first_step"]), "resumed here") for start in found.runs if start["first_step"]]
    faults = [(float(fault["step"]), "fault") for fault in found.faults if _number(fault.get("step")) is not None]
    marks = Marks(steps=[*starts, *faults])

    def plain(name: str, title: str, words: str, unit: Callable[[float], str], **options: Any) -> Plot:
        series = [Series(name=title, points=_points(found, name))]
        draw = functools.partial(line_plot, series, title=title, unit=unit, **{"marks": marks, **options})
        return Plot(title, words, name, draw)

    estimated = _number(run.get("estimated_seconds"))
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
    by_rank: dict[int, list[tuple[float, float]]] = {}
    for step in found.steps:
        for rank, value in _peaks(step).items():
            by_rank.setdefault(rank, []).append((float(step["step"]), value / _GIB))
    order = sorted(by_rank, key=lambda rank: -by_rank[rank][-1][1])
    shown = order if len(order) <= _RANKS else [order[0], order[-1]]
    series = [
        Series(name=f"rank {rank}", points=by_rank[rank], kind="front" if rank == order[0] else "series")
        for rank in reversed(shown)
    ]
    estimated = _estimated_memory(run)
    levels = [] if estimated is None else [(estimated / _GIB, f"estimated {memory(estimated)}")]
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
        parts = step.get("parts")
        if isinstance(parts, Mapping):
            steps.append((float(step["step"]), {name: _number(parts.get(name)) or 0.0 for name in PARTS}))
    words = (
        "Backward is everything from the end of forward to the optimizer: gradients, their reduction, clipping. "
        "Between is what lies between two steps: the loader, logging, evaluation, saves."
    )
    draw = functools.partial(parts_plot, steps, unit=seconds)
    return Plot("Time of a step by part", words, "parts", draw, [(COLOURS[name], name) for name in PARTS])


def _stragglers(found: RunRecords) -> list[tuple[str, str, str]]:
    """Return (rank, how often it was the slowest, by how much on average), most often first."""
    behind: dict[int, list[float]] = {}
    for step in found.steps:
        rank, value = step.get("slowest"), _number(step.get("behind"))
        if isinstance(rank, int) and value is not None:
            behind.setdefault(rank, []).append(value)
    order = sorted(behind, key=lambda rank: -sum(behind[rank]))[:_STRAGGLERS]
    return [
        (f"rank {rank}", f"slowest in {len(behind[rank])} of {len(found.steps)} lines",
         f"+{seconds(sum(behind[rank]) / len(behind[rank]))} per step")
        for rank in order
    ]  # fmt: skip


def _estimates(found: RunRecords) -> list[tuple[str, str, str]]:
    """Return (what, estimated, measured) of the last comparison."""
    if not found.estimates:
        return []
    last = found.estimates[-1]
    rows = []
    time, measured = _number(last.get("estimated_seconds")), _number(last.get("measured_seconds"))
    if time and measured:
        band = _number(last.get("band")) or 0.0
        rows.append(
            ("time per step", f"{seconds(time)} \u00b1{band:.0%}", f"{seconds(measured)} ({measured / time:.2f}\u00d7)")
        )
    most, peak = _estimated_memory(last), _number(last.get("measured_peak"))
    if most and peak:
        rows.append(("memory of the fullest rank", memory(most), f"{memory(peak)} ({peak / most:.2f}\u00d7)"))
    return rows + [("hint", str(hint), "") for hint in last.get("hints") or []]


def _footer(found: RunRecords) -> str:
    torn = f" {found.torn} line(s) of the log are no records, such as one that was cut off." if found.torn else ""
    starts = f"{len(found.runs)} start{'s' if len(found.runs) != 1 else ''} of the program"
    return f"{len(found.steps):,} lines, {starts}.{torn}"
