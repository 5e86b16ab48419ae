"""Stacked bars as a drawing, for pages without JavaScript."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.planner.page.draw import Box, Svg, text_width

_NOTE = 62  # width of the totals' column


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One stacked bar.

    Args:
        label: text above the bar.
        parts: part -> value; empty for a line that stands for omitted bars.
        note: its total as text.
        is_emphasised: whether its texts are bold.
    """

    label: str
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    is_emphasised: bool = False


def stacked(
    svg: Svg,
    bars: Sequence[Bar],
    *,
    limit: float,
    unit: Callable[[float], str],
    marks: Sequence[tuple[float, str]] = (),
) -> Svg:
    """Draw bars below each other, each with its label above it and its total on the right.

    Args:
        svg: the diagram to draw on, whose height follows from the bars.
        bars: the bars.
        limit: value of a bar across the full width.
        unit: function that formats a value.
        marks: (value, label) of vertical lines across all bars.
    """
    thick = 34 if len(bars) <= 2 else 24 if len(bars) <= 6 else 14
    top = 18 * len(marks) + (8 if marks else 0)
    pitch = 20 + thick + (14 if thick > 14 else 8)
    heights = [pitch if bar.parts else 28 for bar in bars]
    svg.height = top + sum(heights) + 2
    scale = (svg.width - 2 - (_NOTE if marks else 0)) / limit  # lines must not cross the totals
    for row, (value, label) in enumerate(marks):
        x = value * scale
        svg.line(x, 18 * row + 4, x, svg.height, "mark")
        svg.text(x - 6, 18 * row + 13, label, "mark-label", anchor="end")
    y = float(top)
    for bar, height in zip(bars, heights, strict=True):
        if not bar.parts:
            svg.text(0, y + 16, bar.label, "muted halo")
            svg.text(svg.width - 2, y + 16, bar.note, "muted num halo", anchor="end")
            y += height
            continue
        svg.text(0, y + 13, bar.label, "strong" if bar.is_emphasised else "label")
        svg.text(svg.width - 2, y + 13, bar.note, "strong num" if bar.is_emphasised else "label num", anchor="end")
        svg.open("bar", total=sum(bar.parts.values()), scale=scale)
        x = 0.0
        for name, value in bar.parts.items():
            if value <= 0:
                continue
            length = value * scale
            share = value / sum(bar.parts.values())
            box = Box(x, y + 20, length, thick)
            svg.part(box, name, title=f"{name}: {unit(value)}, {share:.0%} ({bar.label})")
            if thick >= 24:
                _inside(svg, name, unit(value), box)
            x += length
        svg.close()
        y += height
    return svg


def _inside(svg: Svg, name: str, value: str, box: Box) -> None:
    """Write a part's name and value on the part, as far as there is room."""
    x, y, length, thick = box
    room = length - 10
    if thick >= 30 and max(text_width(name, 11.5), text_width(value, 11)) < room:
        svg.text(x + 6, y + 15, name, f"inside t-{name}")
        svg.text(x + 6, y + 28, value, f"inside small t-{name}")
    elif text_width(name, 11.5) < room:
        svg.text(x + 6, y + thick / 2 + 4, name, f"inside t-{name}")
