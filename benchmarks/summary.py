"""Summarises measured times: medians, and ratios that are paired within a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

from benchmarks.contenders import ONE_PROCESS


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A summary of the quotients of two contenders' times, one per round."""

    median: float
    low: float
    high: float

    @classmethod
    def paired(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
        """Return the ratio of step times that were measured in the same rounds."""
        quotients = [a / b for a, b in zip(numerators, denominators, strict=True)]
        return cls(median=median(quotients), low=min(quotients), high=max(quotients))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> str:
    """Return the median ratio of values that were measured in the same rounds, with its 95 % interval, as words."""
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    low, high = interval(ratios)
    return f"{median(ratios):.3f} ({low:.3f}-{high:.3f})"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of one contest.

    Attributes:
        median_seconds: contender -> seconds per step.
        ratio: base -> contender -> base / contender. The bases are this project's contenders or, if none of them ran,
            the one-process contender.
        efficiency: contender -> one process / (processes x contender); empty if the one-process contender did not run.
    """

    median_seconds: dict[str, float]
    ratio: dict[str, dict[str, Ratio]]
    efficiency: dict[str, Ratio]


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median of ordered values: all of them if there are fewer than six."""
    count, below, skipped = len(ordered), 0.0, 0
    while (below := below + comb(count, skipped) / 2**count) <= 0.025:
        skipped += 1
    return ordered[max(skipped - 1, 0)], ordered[count - max(skipped, 1)]


def summarise(seconds: dict[str, list[float]], *, processes: int) -> Summary:
    """Return a summary of contenders' step times (contender -> seconds, one per round) on ``processes`` processes."""
    bases = [name for name in seconds if name.startswith("ours")] or [ONE_PROCESS]
    one = seconds.get(ONE_PROCESS, [])
    return Summary(
        median_seconds={name: median(times) for name, times in seconds.items()},
        ratio={
            base: {name: Ratio.paired(seconds[base], seconds[name]) for name in seconds if name != base}
            for base in bases
            if base in seconds
        },
        efficiency={
            name: Ratio.paired(one, [processes * time for time in times])
            for name, times in seconds.items()
            if one and name != ONE_PROCESS
        },
    )
