"""Memory against time: every plan that fits, the Pareto front, and the plans that a diagram of them shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.planner.job.candidate import Candidate
from meshwright.planner.memory.peak import peak_memory
from meshwright.planner.search.search import Search
from meshwright.planner.time.step import StepModel

_SLOWEST = 6.0  # plans slower than this many times the best step are counted, not drawn
_PLACES = 100  # places along each axis of the diagram; one dot stands for all plans on a place


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
    of the front. A plan is simulated only if its lower bound is below the front so far, so no plan lies below the
    front.
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


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The points that the diagram shows.

    Args:
        points: for each place of the diagram, the fastest of the points that fall on it.
        slowest: time of the slowest plans that are drawn; the others are counted.
    """

    points: tuple[Point, ...]
    slowest: float


def drawn_points(found: Search, points: Iterable[Point]) -> Drawn:
    """Return the points to draw."""
    fastest = found.choices[0].time.total
    slowest = fastest * _SLOWEST
    places: dict[tuple[int, int], Point] = {}
    for point in sorted(points, key=lambda point: point.time):
        if point.time <= slowest:
            across = round(_PLACES * point.memory / found.cluster.device.memory)
            up = round(_PLACES * math.log(point.time / fastest) / math.log(_SLOWEST))
            places.setdefault((across, up), point)
    return Drawn(points=tuple(places.values()), slowest=slowest)
