"""Draw the figures of a run over its steps, in the style of the planner's page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.monitor.figures import PARTS
from meshwright_tools.plan_page.render import Box, Svg, number, text_width, ticks

_LEFT, _TOP, _BOTTOM, _HEIGHT = 56, 10, 26, 210  # pixels
_MOST = 400  # points of one line; more are joined to means
# Part of a step, or series -> the part of the planner's palette that has its colour.
COLOURS = {"forward": "matmul", "backward": "backward", "optimizer": "optimizer", "between": "bubble"}


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a plot.

    Args:
        name: its name.
        points: (step, value), in the order of the steps.
        kind: CSS class of the line.
    """

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "front"


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Lines that are drawn across a plot.

    Args:
        levels: (value, label) of horizontal lines.
        steps: (step, label) of vertical lines.
    """

    levels: Sequence[tuple[float, str]] = ()
    steps: Sequence[tuple[float, str]] = ()


def thinned(points: Sequence[tuple[float, float]], most: int = _MOST) -> list[tuple[float, float]]:
    """Return at most about ``most`` points: means of neighbours.

    Example:
        >>> thinned([(1, 10.0), (2, 20.0), (3, 30.0), (4, 50.0)], most=2)
        [(1.5, 15.0), (3.5, 40.0)]
    """
    size = max(1, -(-len(points) // most))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def line_plot(
    series: Sequence[Series],
    width: float,
    ident: str,
    *,
    title: str,
    unit: Callable[[float], str],
    from_zero: bool = True,
    marks: Marks | None = None,
) -> Svg:
    """Draw values over steps.

    Args:
        series: the lines.
        width: width of the picture in pixels.
        ident: unique prefix of the picture's ids.
        title: text for screen readers.
        unit: function that formats a value.
        from_zero: whether the axis of the values begins at zero, if none is below.
        marks: levels and steps to mark.
    """
    marks = marks or Marks()
    drawn = [(one, thinned([point for point in one.points if math.isfinite(point[1])])) for one in series]
    drawn = [(one, points) for one, points in drawn if points]
    last = "; ".join(f"{one.name} ends at {unit(points[-1][1])}" for one, points in drawn)
    svg = Svg(ident=ident, width=width, height=_TOP + _HEIGHT + _BOTTOM, title=title, description=last or "no values")
    if not drawn:
        svg.text(0, 24, "no values", "muted")
        return svg
    values = [y for _, points in drawn for _, y in points] + [value for value, _ in marks.levels]
    low, high = (min(0.0, *values) if from_zero else min(values)), max(values)
    if high <= low:
        low, high = low - abs(low) * 0.05 - 1e-9, high + abs(high) * 0.05 + 1e-9
    span = high - low
    low, high = (low if from_zero and low == 0 else low - 0.05 * span), high + 0.05 * span
    steps = [x for _, points in drawn for x, _ in points]
    first, final = min(steps), max(steps)
    place = _Place(width, low, high, first, final if final > first else first + 1)
    _draw_values(svg, place, unit)
    _draw_steps(svg, place)
    for value, label in marks.levels:
        svg.line(_LEFT, place.y(value), width, place.y(value), "mark")
        svg.text(width - 2, place.y(value) - 4, label, "mark-label", anchor="end")
    for step, label in marks.steps:
        if first <= step <= final:
            svg.path(f"M{number(place.x(step))} {_TOP}V{_TOP + _HEIGHT}", "mark", title=label)
    for one, points in drawn:
        path = "L".join(f"{number(place.x(x))} {number(place.y(y))}" for x, y in points)
        svg.path(f"M{path}", one.kind, title=one.name)
        for x, y in points if len(points) <= 60 else points[-1:]:
            svg.circle(place.x(x), place.y(y), 2.5, f"{one.kind}-dot", title=f"{one.name}, step {x:g}: {unit(y)}")
    return svg


@dataclass(frozen=True)
class _Place:
    width: float
    low: float
    high: float
    first: float
    final: float

    def x(self, step: float) -> float:
        return _LEFT + (step - self.first) / (self.final - self.first) * (self.width - _LEFT - 8)

    def y(self, value: float) -> float:
        return _TOP + _HEIGHT * (1 - (value - self.low) / (self.high - self.low))


def _draw_values(svg: Svg, place: _Place, unit: Callable[[float], str]) -> None:
    for value in ticks(place.low, place.high, 5):
        svg.line(_LEFT, place.y(value), place.width, place.y(value), "grid")
        svg.text(_LEFT - 6, place.y(value) + 4, unit(value), "axis", anchor="end")


def _draw_steps(svg: Svg, place: _Place) -> None:
    for step in ticks(place.first, place.final, 6 if place.width > 400 else 3):
        if step == int(step):
            label = f"{int(step):,}"
            half = text_width(label, 11.5) / 2
            x = min(max(place.x(step), half), place.width - half)
            svg.text(x, _TOP + _HEIGHT + 18, label, "axis", anchor="middle")


def parts_plot(
    steps: Sequence[tuple[float, Mapping[str, float]]], width: float, ident: str, unit: Callable[[float], str]
) -> Svg:
    """Draw the time of a step by part, one bar for each line of the log or for the mean of neighbouring ones."""
    size = max(1, -(-len(steps) // (60 if width > 400 else 24)))
    groups = [steps[at : at + size] for at in range(0, len(steps), size)]
    bars = [
        (group[0][0], {name: sum(parts.get(name, 0.0) for _, parts in group) / len(group) for name in PARTS})
        for group in groups
    ]
    most = max((sum(parts.values()) for _, parts in bars), default=0.0)
    words = "; ".join(f"{name} {unit(bars[-1][1][name])}" for name in PARTS) if bars else "no values"
    svg = Svg(
        ident=ident, width=width, height=_TOP + _HEIGHT + _BOTTOM, title="Time of a step by part", description=words
    )
    if most <= 0:
        svg.text(0, 24, "no values", "muted")
        return svg
    place = _Place(width, 0.0, most * 1.05, 0, len(bars))
    _draw_values(svg, place, unit)
    for index, (step, parts) in enumerate(bars):
        x, end = place.x(index), place.x(index + 1)
        below = 0.0
        for name in PARTS:
            top, bottom = place.y(below + parts[name]), place.y(below)
            box = Box(x, top, (end - x) * 0.85, bottom - top)
            svg.part(box, COLOURS[name], title=f"{name}, from step {step:g}: {unit(parts[name])}")
            below += parts[name]
    svg.text(_LEFT, _TOP + _HEIGHT + 18, f"{bars[0][0]:,.0f}", "axis")
    if len(bars) > 1:
        svg.text(width - 2, _TOP + _HEIGHT + 18, f"{bars[-1][0]:,.0f}", "axis", anchor="end")
    return svg
