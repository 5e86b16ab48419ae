"""Put the simplest plan first among those whose times are too close to rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate, Job
from meshwright.planner.search import Choice, Search
from meshwright.planner.space import Space

TIE = 0.03  # relative difference in time below which two plans tie, since runs of one plan differ as much
SIMPLER = 0.10  # time that a simpler plan may cost if it is preferred
_Choice = TypeVar("_Choice", bound=Choice)
_REASON = "a plan with fewer axes was looked for"


def complexity(plan: Candidate) -> tuple[int, ...]:
    """Return a key that is smaller for a simpler plan: axes, uneven or interleaved stages, ZeRO-3, schedule, recompute.

    Example:
        >>> complexity(Candidate(shard=8, zero_stage=1)) < complexity(Candidate(shard=4, tp=2, zero_stage=1))
        True
    """
    axes = sum(size > 1 for size in (plan.tp, plan.cp, plan.pp, plan.ep))
    uneven = plan.stages is not None and len(set(plan.stages)) > 1
    is_usual = plan.pp == 1 or plan.schedule == "1f1b"
    again = int(plan.recompute != "none")
    return (axes, int(uneven), plan.chunks, int(not is_usual), int(plan.zero_stage == 3), again, plan.zero_stage)


def in_order(choices: Sequence[_Choice], job: Job, *, within: float = TIE) -> list[_Choice]:
    """Return plans in the order in which they are shown.

    Plans without 32-bit masters come last, if the job prefers masters. Of the others, those within a share of the
    fastest are ordered by simplicity, and the rest by time.
    """

    def last(choice: _Choice) -> bool:
        return job.prefers_masters and job.rounds_updates(choice.plan)

    fastest = {kind: min((c.time.total for c in choices if last(c) is kind), default=0.0) for kind in (False, True)}

    def key(choice: _Choice) -> tuple[bool, bool, tuple[int, ...], float]:
        is_close = choice.time.total <= fastest[last(choice)] * (1 + within)
        return last(choice), not is_close, complexity(choice.plan) if is_close else (), choice.time.total

    return sorted(choices, key=key)


def with_simple_plans(found: Search, space: Space, find: Callable[[Space], Search], *, within: float = TIE) -> Search:
    """Return a search whose choices include the simplest ties, in the order in which plans are shown.

    The search keeps the fastest plans alone, and there may be many faster ones than a simpler plan that ties with them.
    So the fastest plans with one axis beside dp at most are looked for too.

    Args:
        found: the outcome of a search.
        space: the space that was searched.
        find: a function that searches a space.
        within: the share of the fastest plan's time by which a plan may be slower to come before it.
    """
    if not found.choices:
        return found
    axes = ("no_tensor", "no_context", "no_stages", "no_sharing")
    choices = {choice.plan: choice for choice in found.choices}
    fewest = complexity(in_order(found.choices, found.job, within=within)[0].plan)[0]
    # A plan with more axes than the first one is not simpler.
    for kept in (None, *axes)[: 0 if fewest == 0 else 1 if fewest == 1 else None]:
        without = {name: getattr(space, name) or _REASON for name in axes if name != kept}
        try:
            simple = find(dataclasses.replace(space, **without))  # type: ignore[arg-type]
        except PlanError:
            continue
        choices |= {choice.plan: choice for choice in simple.choices}
    ordered = in_order(list(choices.values()), found.job, within=within)
    return dataclasses.replace(found, choices=tuple(ordered), within=within)
