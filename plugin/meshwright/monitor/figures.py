"""The figures of one interval of training: of each rank, and of all ranks together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.monitor.expert_load import fullest_loads

PARTS = ("forward", "backward", "optimizer", "between")  # the parts of a step, in order


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """The measurements of one rank between two lines.

    Args:
        seconds: the host's seconds between the two lines.
        steps: number of optimizer steps.
        tokens: tokens of this rank's rows.
        flops: floating-point operations of forward and backward for these tokens, over all ranks that share them.
        waited: seconds in which the host waited for other ranks, at meetings and in collectives.
        peak: the largest memory of this rank so far, in bytes.
        read: seconds in which the program waited for its data.
        parts: part of a step -> seconds per step.
        experts: module of experts -> the tokens of each expert that this rank has routed.
    """

    seconds: float
    steps: int
    tokens: int
    flops: float
    waited: float
    peak: float
    read: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    experts: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one interval over all ranks.

    Args:
        step: the last step of the interval.
        loss: the loss of that step; None if the model returns none.
        norm: the gradient norm before clipping; None if the program does not clip.
        lr: the learning rate of the optimizer's first group.
        tokens: tokens of the interval, each counted once.
        seconds_per_step: seconds per optimizer step.
        tokens_per_second: tokens per second over all ranks.
        ranks: number of ranks.
        mfu: model FLOPs per second divided by the devices' peak; None if the peak or the model's sizes are unknown.
        peak: rank -> the largest memory so far, in bytes.
        slowest: the rank for which the others wait.
        behind: seconds per step by which that rank is later than the median of the others.
        parts: part of a step -> seconds per step, the mean over the ranks.
        waited: seconds per step in which a rank waits for others, the mean over the ranks.
        busy: rank -> seconds per step in which it did not wait for other ranks.
        read: rank -> seconds per step in which it waited for its data.
        left: seconds until ``max_steps``; None if that is not set.
        expert_load: module of experts -> the tokens of its fullest expert, relative to the mean.
        rank_load: the tokens of the fullest of the ranks that share experts, relative to the mean; None without ep.
    """

    step: int
    loss: float | None
    norm: float | None
    lr: float | None
    tokens: int
    seconds_per_step: float
    tokens_per_second: float
    ranks: int
    mfu: float | None
    peak: Mapping[int, float]
    slowest: int | None
    behind: float
    parts: Mapping[str, float]
    waited: float
    busy: Mapping[int, float] = field(default_factory=dict)
    read: Mapping[int, float] = field(default_factory=dict)
    left: float | None = None
    expert_load: Mapping[str, float] = field(default_factory=dict)
    rank_load: float | None = None

    @property
    def fullest(self) -> int:
        """The rank with the largest memory."""
        return max(self.peak, key=lambda rank: self.peak[rank])

    def as_logs(self) -> dict[str, float]:
        """Return the figures for a tracker, as numbers under stable names; see docs/monitoring.md."""
        found: dict[str, float | None] = {
            "seconds_per_step": self.seconds_per_step,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_device": self.tokens_per_second / self.ranks,
            "mfu": self.mfu,
            "peak_memory_gib": self.peak[self.fullest] / 2**30,
            "peak_memory_rank": self.fullest,
            "slowest_rank": self.slowest,
            "slowest_rank_behind_ms": None if self.slowest is None else 1e3 * self.behind,
            "data_wait_ms": 1e3 * max(self.read.values(), default=0.0) or None,
            "expert_load": max(self.expert_load.values(), default=None),
            "expert_rank_load": self.rank_load,
        }
        return {name: round(value, 4) for name, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """The values of the last step of an interval, as rank 0 knows them."""

    step: int
    loss: float | None = None
    norm: float | None = None
    lr: float | None = None


def together(
    step: StepFigures,
    ranks: Mapping[int, RankFigures],
    *,
    row_copies: int,
    peak_flops: float | None,
    ep: int = 1,
    max_steps: int | None = None,
) -> Figures:
    """Return the figures of an interval from those of each rank.

    Args:
        step: the interval's last step.
        ranks: rank -> its figures; at least those of one rank.
        row_copies: number of ranks that have the same rows, whose tokens count once.
        peak_flops: the peak of one device in floating-point operations per second; None if unknown.
        ep: the number of ranks that share the experts of a layer.
        max_steps: number of steps of the run, if known.

    Example:
        >>> own = RankFigures(seconds=2.0, steps=4, tokens=800, flops=1e9, waited=0.0, peak=5.0)
        >>> both = together(StepFigures(step=4), {0: own, 1: own}, row_copies=2, peak_flops=5e8)
        >>> both.tokens_per_second, both.mfu
        (400.0, 0.5)
    """
    of_all = list(ranks.values())
    seconds = max(1e-9, *(own.seconds for own in of_all))
    steps = max(1, *(own.steps for own in of_all))
    tokens = sum(own.tokens for own in of_all) / row_copies
    flops = sum(own.flops for own in of_all) / row_copies
    slowest, behind = _straggler(ranks, steps)
    per_step = seconds / steps
    expert_load, rank_load = fullest_loads([own.experts for own in of_all], ep)
    return Figures(
        step=step.step,
        loss=step.loss,
        norm=step.norm,
        lr=step.lr,
        tokens=round(tokens),
        seconds_per_step=per_step,
        tokens_per_second=tokens / seconds,
        ranks=len(ranks),
        mfu=flops / seconds / (peak_flops * len(ranks)) if peak_flops and flops else None,
        peak={rank: own.peak for rank, own in sorted(ranks.items())},
        slowest=slowest,
        behind=behind,
        parts={name: statistics.fmean(own.parts.get(name, 0.0) for own in of_all) for name in PARTS},
        waited=statistics.fmean(own.waited for own in of_all) / steps,
        busy={rank: max(0.0, own.seconds - own.waited) / steps for rank, own in sorted(ranks.items())},
        read={rank: own.read / steps for rank, own in sorted(ranks.items())},
        left=None if max_steps is None else max(0, max_steps - step.step) * per_step,
        expert_load=expert_load,
        rank_load=rank_load,
    )


def _straggler(ranks: Mapping[int, RankFigures], steps: int) -> tuple[int | None, float]:
    """Return the rank that waits the least, and the seconds per step that the median of the others waits longer."""
    if len(ranks) < 2:
        return None, 0.0
    slowest = min(ranks, key=lambda rank: ranks[rank].waited)
    others = [own.waited for rank, own in ranks.items() if rank != slowest]
    return slowest, (statistics.median(others) - ranks[slowest].waited) / steps
