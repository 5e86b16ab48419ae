"""Chooses the plans that the page shows: those of its table, and those of its diagram of memory against time.

The table lists the fastest plan, the fastest of each kind, and lean ones. The diagram shows the Pareto front and, of
all plans that fit, one for each place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshwright_plan.answers.explain import ties
from meshwright_plan.job.candidate import Candidate
from meshwright_plan.memory.peak import peak_memory
from meshwright_plan.search.search import Choice, Search, choice_of, in_order
from meshwright_plan.time.step import StepModel

PLANS = 16  # largest number of plans of an answer, unless the search has more choices
_SLOWEST = 6.0  # plans slower than this many times the best step are counted, not drawn
_PLACES = 100  # places along each axis of the diagram; one dot stands for all plans on a place
_GIB = 2**30


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
    space = dataclasses.replace(found.space, job=job)
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


@dataclass(frozen=True, kw_only=True)
class Listed(Choice):
    """A plan of the page's table.

    Args:
        why: the reason for which it is listed.
    """

    why: str


def listed_plans(found: Search, points: Sequence[Point], front: Sequence[Point], *, most: int = PLANS) -> list[Listed]:
    """Return the plans of the table, the best first.

    These are the choices of the search, the fastest plan of each set of parallel axes, and plans of the Pareto front
    with little memory.

    Args:
        found: the outcome of a search.
        points, front: result of ``pareto``.
        most: largest number of plans, unless the search has more choices.
    """
    model = StepModel(found.shape, found.cluster, found.profile.coefficients)
    tied = ties(found)
    reasons = {choice.plan: _why(found, index, tied) for index, choice in enumerate(found.choices)}
    for axes, plan in _fastest_of_axes(found, model, points):
        if len(reasons) < most:
            reasons.setdefault(plan, f"fastest with {axes}")
    room = max(0, most - len(reasons))
    for point in _spread([point for point in front if point.plan not in reasons], room):
        reasons[point.plan] = "leanest" if point is front[0] else "lean"
    known = {choice.plan: choice for choice in found.choices}
    plans = []
    for plan, why in reasons.items():
        choice = known.get(plan) or choice_of(
            found.space, plan, model.step(plan, found.job), peak_memory(found.shape, plan, found.job)
        )
        rounds = found.job.rounds_updates(plan)
        plans.append(Listed(**vars(choice), why=why + ", without 32-bit masters" * rounds))
    return in_table_order(found, plans)


def in_table_order(found: Search, plans: Sequence[Listed]) -> list[Listed]:
    """Return plans in the order of the table: the first choice of the search leads, the others follow in its order."""
    ordered = in_order(plans, found.job, within=found.within)
    first = next(listed for listed in ordered if listed.plan == found.choices[0].plan)
    return [first, *(listed for listed in ordered if listed is not first)]


def _why(found: Search, index: int, tied: int) -> str:
    fastest = min(range(len(found.choices)), key=lambda at: found.choices[at].time.total)
    if index == 0 and fastest:
        return "simplest of the fastest"
    return "fastest" if index == fastest else "ties with the fastest" if index < tied else "fast"


def _fastest_of_axes(found: Search, model: StepModel, points: Sequence[Point]) -> list[tuple[str, Candidate]]:
    """Return the fastest plan of each set of axes, with the set as text, in the order of their times."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        plan = point.plan
        sizes = {**plan.sizes_beside_dp, "ep": plan.ep}
        axes = " + ".join(name for name, size in sizes.items() if size > 1) or "dp alone"
        groups.setdefault(axes, []).append(point)
    fastest = []
    for axes, group in groups.items():
        best, plan = math.inf, group[0].plan
        for point in sorted(group, key=lambda point: point.time):
            if point.time >= best:
                break  # the other plans' lower bounds are larger still
            total = point.time if point.exact else model.step(point.plan, found.job).total
            if total < best:
                best, plan = total, point.plan
        fastest.append((best, axes, plan))
    return [(axes, plan) for _, axes, plan in sorted(fastest, key=lambda item: item[0])]


def _spread(front: Sequence[Point], count: int) -> list[Point]:
    """Return points of the front, the leanest first, that are as far as possible from each other."""
    if not front:
        return []
    taken = [front[0]][:count]
    rest = list(front[1:])
    low, high = front[0].memory, front[-1].memory
    span = math.log(front[0].time / front[-1].time) or 1.0

    def distance(one: Point, two: Point) -> float:
        across = abs(one.memory - two.memory) / max(high - low, _GIB)
        return across + abs(math.log(one.time / two.time)) / span

    while rest and len(taken) < count:
        far = max(rest, key=lambda point: min(distance(point, other) for other in taken))
        rest.remove(far)
        taken.append(far)
    return taken
