"""Plans of other settings: one that fits at each length, or one that ties with the planner's at each setting."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.planner.job.candidate import Candidate
from meshwright.planner.memory.peak import state_memory
from meshwright.planner.page.listing import Listed, in_table_order
from meshwright.planner.page.settings import PageSettings
from meshwright.planner.search.best_first import BestFirst
from meshwright.planner.search.search import choice_of
from meshwright.planner.search.simplicity import BESIDE_DP, TIE

_Setting = tuple[int, int, int]  # the index on the sliders of the batch, the length and the GPUs


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A plan of the table that cannot run, or does not fit, in the planned job.

    Args:
        plan: the plan at the setting for which it is listed.
        why: the reason for which it is listed.
    """

    plan: Candidate
    why: str


def with_each_length(settings: PageSettings, plans: Sequence[Listed], most: int) -> list[Listed | Elsewhere]:
    """Return the table with a plan that fits at each length of the planned batch and GPUs, if there is one.

    A length at which no plan of the table fits is searched. If there are too many plans, the search's choices stay,
    then the plans of the nearest lengths.

    Args:
        settings: the outcome of a search, and the sliders.
        plans: the plans of the table.
        most: largest number of plans on the table, unless the search has more choices.
    """
    found, (batch, planned, gpus, micro) = settings.found, settings.planned
    chosen = {choice.plan for choice in found.choices}
    kept: list[Listed | Elsewhere] = [each for each in plans if each.plan in chosen]

    def seconds(each: Listed | Elsewhere, length: int) -> float:
        with contextlib.suppress(PlanError):
            if (time := settings.outcome(each.plan, (batch, length, gpus, micro)).time) is not None:
                return time.total
        return math.inf

    for length in sorted(range(len(settings.ranges.lengths)), key=lambda length: abs(length - planned)):
        if any(seconds(each, length) < math.inf for each in kept):
            continue
        fastest = min(plans, key=lambda each: seconds(each, length))
        if seconds(fastest, length) < math.inf:
            kept.append(fastest)
        else:
            at = batch, length, gpus
            kept += [_planned(settings, plan, at) for plan in _faster(settings, at, math.inf, math.inf)]
    rows = [*kept, *(each for each in plans if each not in kept)][: max(most, len(chosen))]
    return _ordered(
        settings,
        [each for each in rows if isinstance(each, Listed)],
        [each for each in rows if isinstance(each, Elsewhere)],
    )


def with_every_setting(
    settings: PageSettings, plans: Sequence[Listed], most: int, progress: Callable[[int, int], None]
) -> tuple[list[Listed | Elsewhere], bool]:
    """Return the table with the plans that a search finds at other settings, and whether none is missing.

    A plan is added if it is more than a tie faster than the fastest of the table at a setting, or if no plan of the
    table fits there. The settings next to the planned one come first.

    Args:
        settings: the outcome of a search, and the sliders.
        plans: the plans of the table.
        most: largest number of plans on the table.
        progress: a function that is called with the number of searches so far, and their total number.
    """
    values, start, job = settings.ranges, settings.planned, settings.found.job
    batches, lengths, gpus = (range(len(of)) for of in (values.batches, values.lengths, values.gpus))
    every: list[_Setting] = sorted(
        itertools.product(batches, lengths, gpus),
        key=lambda at: sum(abs(one - two) for one, two in zip(at, start, strict=False)),
    )
    fastest: dict[tuple[_Setting, bool], float] = {}  # the second: without 32-bit masters, if the job prefers them
    listed: list[Listed] = list(plans)
    elsewhere: list[Elsewhere] = []

    def note(plan: Candidate) -> None:
        for at in every:
            try:
                outcome = settings.outcome(plan, (*at, start[3]))
            except PlanError:
                continue
            if outcome.time is not None:
                key = at, job.prefers_masters and job.rounds_updates(outcome.plan)
                fastest[key] = min(fastest.get(key, math.inf), outcome.time.total)

    for each in plans:
        note(each.plan)
    for number, at in enumerate(every):
        progress(number + 1, len(every))
        for plan in _faster(settings, at, *(fastest.get((at, rounds), math.inf) for rounds in (False, True))):
            if len(listed) + len(elsewhere) >= most:
                return _ordered(settings, listed, elsewhere), False
            note(plan)
            here = _planned(settings, plan, at)
            if isinstance(here, Listed):
                listed.append(here)
            else:
                elsewhere.append(here)
    return _ordered(settings, listed, elsewhere), True


def _faster(settings: PageSettings, at: _Setting, best: float, without_masters: float) -> Iterator[Candidate]:
    """Yield the fastest plan of a setting, if it is more than a tie faster than those of the table.

    Args:
        settings: the search, and the sliders.
        at: the setting.
        best: seconds of the fastest plan of the table; infinite if none fits.
        without_masters: seconds of its fastest plan without 32-bit masters, if the job prefers these.
    """
    space, model, found = settings.space_at(at), settings.model_at(at[2]), settings.found
    if state_memory(found.shape, space.job) > space.cluster.gpus * found.budget:
        return  # no plan fits, but a search would weigh them all
    walk = BestFirst(space, model, found.budget)
    prefers = found.job.prefers_masters
    fastest = walk.fastest_with(BESIDE_DP, 1, slowest=best / (1 + TIE), rounds=False if prefers else None)
    if not fastest and prefers and math.isinf(best):
        fastest = walk.fastest_with(BESIDE_DP, 1, slowest=without_masters / (1 + TIE), rounds=True)
    for plan, _ in fastest:
        yield plan


def _planned(settings: PageSettings, plan: Candidate, at: _Setting) -> Listed | Elsewhere:
    """Return the row of the fastest plan of another setting."""
    found, values = settings.found, settings.ranges
    batch, length, size = values.batches[at[0]], values.lengths[at[1]], values.gpus[at[2]]
    why = f"fastest at {batch:,} x {length:,} tokens, {size:,} GPU{'s' if size > 1 else ''}"
    try:
        outcome = settings.outcome(plan, settings.planned)
    except PlanError:
        return Elsewhere(plan=plan, why=why)
    if outcome.time is None:
        return Elsewhere(plan=plan, why=why)
    memory = max((memory for _, _, memory in outcome.memory), key=lambda memory: memory.total)
    return Listed(**vars(choice_of(found, outcome.plan, outcome.time, memory)), why=why)


def _ordered(
    settings: PageSettings, listed: Sequence[Listed], elsewhere: Sequence[Elsewhere]
) -> list[Listed | Elsewhere]:
    return [*in_table_order(settings.found, listed), *elsewhere]
