"""Put the simplest plan first among those whose times are too close to rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.planner.job.candidate import Candidate, Job

if TYPE_CHECKING:
    from meshwright.planner.search.search import Choice

TIE = 0.03  # relative difference in time below which two plans tie, since runs of one plan differ as much
SIMPLER = 0.10  # time that a simpler plan may cost if it is preferred
BESIDE_DP = ("tp", "cp", "pp", "ep")  # the axes beside dp, each of which makes a plan less simple
_Choice = TypeVar("_Choice", bound="Choice")


def axes_of(plan: Candidate) -> tuple[str, ...]:
    """Return the axes of a plan beside dp.

    Example:
        >>> axes_of(Candidate(shard=4, tp=2))
        ('tp',)
    """
    return tuple(name for name in BESIDE_DP if getattr(plan, name) > 1)


def complexity(plan: Candidate) -> tuple[int, ...]:
    """Return a key that is smaller for a simpler plan.

    It has the axes, uneven or interleaved stages, ZeRO-3, schedule and recompute. Of plans that are alike in these,
    that with fewer micro-batches is simpler: each has overheads of its own, which the estimate counts only in part.

    Example:
        >>> complexity(Candidate(shard=8, zero_stage=1)) < complexity(Candidate(shard=4, tp=2, zero_stage=1))
        True
    """
    axes, uneven = len(axes_of(plan)), plan.stages is not None and len(set(plan.stages)) > 1
    is_usual = plan.pp == 1 or plan.schedule == "1f1b"
    again = int(plan.recompute != "none")
    stage = plan.zero_stage
    return (axes, int(uneven), plan.chunks, int(not is_usual), int(stage == 3), again, stage, plan.accumulation)


def tie_key(plan: Candidate, seconds: float, fastest: float, *, within: float = TIE) -> tuple[Any, ...]:
    """Return a key in whose order plans are chosen: those within a share of the fastest by simplicity, others by time.

    Example:
        >>> tie_key(Candidate(tp=2), 1.0, 1.0) > tie_key(Candidate(), 1.02, 1.0)
        True
    """
    is_close = seconds <= fastest * (1 + within)
    return not is_close, complexity(plan) if is_close else (), seconds


def in_order(choices: Sequence[_Choice], job: Job, *, within: float = TIE) -> list[_Choice]:
    """Return plans in the order in which they are shown.

    Plans without 32-bit masters come last, if the job prefers masters. Of the others, those within a share of the
    fastest are ordered by simplicity, and the rest by time.
    """

    def last(choice: _Choice) -> bool:
        return job.prefers_masters and job.rounds_updates(choice.plan)

    fastest = {kind: min((c.time.total for c in choices if last(c) is kind), default=0.0) for kind in (False, True)}

    def key(choice: _Choice) -> tuple[Any, ...]:
        return last(choice), *tie_key(choice.plan, choice.time.total, fastest[last(choice)], within=within)

    return sorted(choices, key=key)
