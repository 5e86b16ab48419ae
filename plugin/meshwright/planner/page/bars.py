"""Stacked bars: the memory of each rank, and the step time of the best plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.planner.explain import ties
from meshwright.planner.formatting import gib, seconds
from meshwright.planner.memory import Memory, stage_memory
from meshwright.planner.page.draw import Box, Svg, span, text_width
from meshwright.planner.search import Search

_ROWS = 12  # largest number of bars; if there are more, the middle ones are left out
_HEAD, _TAIL = 8, 3  # bars that stay at each end
_NOTE = 62  # width of the totals' column
_GIB = 2**30
_SAME = 2**26  # a smaller difference in bytes is not visible in a bar


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


def rank_groups(found: Search) -> list[tuple[int, int, Memory]]:
    """Return (first rank, last rank, memory) of the best plan for each group of adjacent stages with equal memory."""
    plan = found.choices[0].plan
    ranks = plan.dp * plan.cp * plan.tp
    groups: list[tuple[int, int, Memory]] = []
    for stage in range(plan.pp):
        memory = stage_memory(found.shape, plan, found.job, stage)
        first, last = stage * ranks, (stage + 1) * ranks - 1
        if groups and _same(groups[-1][2], memory):
            groups[-1] = (groups[-1][0], last, groups[-1][2])
        else:
            groups.append((first, last, memory))
    return groups


def _same(one: Memory, two: Memory) -> bool:
    return all(abs(value - two.parts[name]) < _SAME for name, value in one.parts.items())


def memory_bars(found: Search, width: float, ident: str) -> Svg:
    """Draw the memory of each rank under the best plan, beside the device's memory."""
    plan, capacity = found.choices[0].plan, found.cluster.device.memory
    groups = rank_groups(found)
    most = max(memory.total for _, _, memory in groups)
    shown: list[tuple[int, int, Memory] | None] = [*groups]
    left_out: Sequence[tuple[int, int, Memory]] = ()
    if len(groups) > _ROWS:
        shown, left_out = [*groups[:_HEAD], None, *groups[-_TAIL:]], groups[_HEAD:-_TAIL]
    ranks = plan.dp * plan.cp * plan.tp
    bars: list[Bar] = []
    for group in shown:
        if group is None:
            totals = [memory.total for _, _, memory in left_out]
            stages = span(left_out[0][0] // ranks, left_out[-1][1] // ranks)
            words = f"… stages {stages}, ranks {span(left_out[0][0], left_out[-1][1])}"
            low, high = (round(pick(totals) / _GIB) for pick in (min, max))
            bars.append(Bar(label=words, note=f"{span(low, high)} GiB"))
            continue
        first, last, memory = group
        label = f"ranks {span(first, last)}" if last > first else f"rank {first}"
        if plan.pp > 1:
            a, b = first // ranks, last // ranks
            label = f"stage{'s' if b > a else ''} {span(a, b)}, {label}"
        is_fullest = memory.total == most
        bars.append(Bar(label=label, parts=memory.parts, note=gib(memory.total), is_emphasised=is_fullest))
    description = "; ".join(f"{bar.label}: {bar.note}" for bar in bars) + f"; the budget is {gib(found.budget)}"
    svg = Svg(ident=ident, width=width, title="Memory of each rank", description=description)
    marks = [(capacity, f"device {gib(capacity)}"), (found.budget, f"budget {gib(found.budget)}")]
    return stacked(svg, bars, limit=max(capacity, most), unit=gib, marks=marks)


def time_bars(found: Search, width: float, ident: str) -> Svg:
    """Draw the parts of the step time of the best plans."""
    tied = ties(found)
    bars = [
        Bar(
            label=f"{'=' if 0 < index < tied else index + 1}  {choice.plan.label}",
            parts=choice.time.parts,
            note=seconds(choice.time.total),
            is_emphasised=not index,
        )
        for index, choice in enumerate(found.choices)
    ]
    description = "; ".join(f"{bar.label}: {bar.note}" for bar in bars)
    svg = Svg(ident=ident, width=width, title="Step time of the best plans", description=description)
    return stacked(svg, bars, limit=max(choice.time.total for choice in found.choices), unit=seconds)


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
