"""The pictures of a run that do not need the page's script: for paper, and for readers who turn scripts off."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from meshwright.monitor.figures import PARTS
from meshwright.monitor.plots import COLOURS, Marks, Series, line_plot, parts_plot
from meshwright.monitor.records import RunRecords, number
from meshwright.monitor.report_data import GIB, by_rank, estimated_memory, shown_ranks
from meshwright.planner.formatting import memory, seconds
from meshwright.planner.page.draw import Svg

_HALF, _NARROW = 538, 336  # widths of pictures in pixels: half a page, and a phone
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
