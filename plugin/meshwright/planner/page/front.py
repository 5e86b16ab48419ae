"""Memory against time: every plan that fits, and the Pareto front."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.planner.candidate import Candidate
from meshwright.planner.formatting import gib, seconds
from meshwright.planner.memory import peak_memory
from meshwright.planner.page.draw import Svg, number, text_width, ticks
from meshwright.planner.search import Search
from meshwright.planner.time import StepModel

_GIB = 2**30
_SLOWEST = 6.0  # plans slower than this many times the best step are counted, not drawn
_LEFT = 58  # pixels for the labels of the time axis
_CELL = 4  # side in pixels of a square in which one dot stands for all plans


@dataclass(frozen=True, kw_only=True)
class Point:
    """A plan that fits.

    Args:
        plan: the plan.
        memory: bytes on the rank that needs the most.
        time: seconds per step; a lower bound unless ``exact``.
        exact: whether the step was simulated.
    """

    plan: Candidate
    memory: float
    time: float
    exact: bool = False


def pareto(found: Search) -> tuple[list[Point], list[Point]]:
    """Return all plans that fit, and the Pareto front in order of memory.

    Each plan on the front is faster than every plan that needs no more memory.

    The search stops at the first recompute that fits. This function tries all of them, since the leaner plans are part
    of the front. A plan is simulated only if its lower bound is below the front so far, so no point is below the line.
    """
    model = StepModel(found.shape, found.cluster, found.profile.coefficients)
    known = {choice.plan: Point(plan=choice.plan, memory=choice.memory.total, time=choice.time.total, exact=True)
             for choice in found.choices}  # fmt: skip
    points = {point.plan: point for point in _weighed(found, model)} | known
    front: list[Point] = []
    for point in sorted(points.values(), key=lambda point: (point.memory, point.time)):
        if front and point.time >= front[-1].time:
            continue
        if not point.exact:
            point = dataclasses.replace(point, time=model.step(point.plan, found.job).total, exact=True)
            points[point.plan] = point
        if front and point.time >= front[-1].time:
            continue
        if front and point.memory == front[-1].memory:
            front.pop()  # the removed plan's bound was lower, but its step is slower
        front.append(point)
    return list(points.values()), front


def _weighed(found: Search, model: StepModel) -> Iterator[Point]:
    job = found.job
    space = found.space(found.cluster, job)
    for region in space.regions():
        for micro in space.micro_batches(region):
            is_any = False
            for zero in space.zero(region):
                for kind in space.recompute(region):
                    even = space.candidate(region, micro, zero, kind)
                    for plan in (even, model.balanced(even, job) if even.pp > 1 else None):
                        memory = peak_memory(found.shape, plan, job).total if plan else math.inf
                        if plan and memory <= found.budget:
                            is_any = True
                            yield Point(plan=plan, memory=memory, time=model.bound(plan, job), exact=plan.pp == 1)
            if not is_any:
                break  # a larger micro-batch needs even more memory


def front_picture(
    found: Search, points: list[Point], front: list[Point], width: float, ident: str, height: float = 380
) -> Svg:
    """Draw memory against time: plans as dots, the front as a line, and the chosen plan as a diamond."""
    best = found.choices[0]
    capacity = found.cluster.device.memory
    limit = best.time.total * _SLOWEST
    drawn = [point for point in points if point.time <= limit]
    slow = max([point.time for point in drawn] + [best.time.total * 1.25])
    left, right, top, bottom = _LEFT, 14, 16, 46
    low, high = math.log(best.time.total * 0.88), math.log(slow * 1.06)
    beyond = len(points) - len(drawn)

    def at_x(memory: float) -> float:
        return left + (width - left - right) * memory / capacity

    def at_y(time: float) -> float:
        return top + (height - top - bottom) * (high - math.log(time)) / (high - low)

    svg = Svg(
        ident=ident, width=width, height=height, title="Memory against step time",
        description=f"{len(points)} plans fit. The front goes from {front[0].plan.label} ({gib(front[0].memory)}, "
        f"{seconds(front[0].time)}) to {front[-1].plan.label} ({gib(front[-1].memory)}, {seconds(front[-1].time)}). "
        f"Chosen: {best.plan.label}.",
    )  # fmt: skip
    base = height - bottom
    for value in ticks(0, capacity / _GIB, 4 if width < 480 else 6):
        x = at_x(value * _GIB)
        svg.line(x, top, x, base, "grid")
        svg.text(x, base + 17, f"{value:g}", "axis", anchor="middle")
    svg.text(width - right, height - 8, "memory of a device, GiB", "axis", anchor="end")
    for value in _log_ticks(math.exp(low), math.exp(high)):
        svg.line(left, at_y(value), width - right, at_y(value), "grid")
        svg.text(
            left - 8, at_y(value) + 4, f"{value:g} s" if value >= 1 else f"{1e3 * value:g} ms", "axis", anchor="end"
        )
    svg.text(left, height - 8, "step time, log", "axis")
    x = at_x(found.budget)
    svg.line(x, top, x, base, "mark")
    svg.text(x - 6, top + 10, f"budget {gib(found.budget)}", "mark-label", anchor="end")

    cells: dict[tuple[int, int], Point] = {}
    for point in sorted(drawn, key=lambda point: point.time):
        cells.setdefault((round(at_x(point.memory) / _CELL), round(at_y(point.time) / _CELL)), point)
    for point in cells.values():
        title = f"{point.plan.label}: {gib(point.memory)}, {'' if point.exact else 'at least '}{seconds(point.time)}"
        svg.circle(at_x(point.memory), at_y(point.time), 2.6, "dot", title=title)
    _front_line(svg, [(at_x(point.memory), at_y(point.time), point) for point in front if point.time <= limit])
    if beyond:
        svg.text(left + 8, top + 12, f"{beyond} slower plans not drawn", "muted halo")

    x, y = at_x(best.memory.total), at_y(best.time.total)
    diamond = f"M{number(x)} {number(y - 8)}l8 8l-8 8l-8 -8z"
    svg.path(
        diamond, "choice", title=f"chosen: {best.plan.label}: {gib(best.memory.total)}, {seconds(best.time.total)}"
    )
    words = f"chosen: {seconds(best.time.total)}, {gib(best.memory.total)}"
    svg.text(max(x - 13, left + text_width(words, 12)), y + 20, words, "strong halo", anchor="end")
    return svg


def _front_line(svg: Svg, places: list[tuple[float, float, Point]]) -> None:
    """Draw the front as stairs, since each plan stays the fastest up to the memory of the next one."""
    if not places:
        return
    x, y, _ = places[0]
    path = f"M{number(x)} {number(y)}" + "".join(f"H{number(x)}V{number(y)}" for x, y, _ in places[1:])
    svg.path(path, "front")
    for x, y, point in places:
        svg.circle(x, y, 4, "front-dot", title=f"{point.plan.label}: {gib(point.memory)}, {seconds(point.time)}")
    if len(places) > 2:
        x, y, point = places[0]
        words = f"leanest: {gib(point.memory)}"
        if x - text_width(words, 12) > _LEFT + 10:  # nothing else is drawn left of the leanest plan
            svg.text(x - 9, y + 4, words, "label halo", anchor="end")
        else:
            svg.text(x - 5, y - 12, words, "label halo")


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers, about evenly spaced on a log scale."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    if high / low < 3:
        return ticks(low, high, 5)
    dense = high / low < 12
    factors = (1, 1.5, 2, 3, 4, 5, 6, 8) if dense else (1, 2, 5)
    return [value for power in powers for f in factors if low <= (value := round(f * 10.0**power, 6)) <= high]
