"""Summarises measured rounds: medians, and ratios that are paired within a round, with their 95 % intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

FEWEST = 6  # fewer values have no interval with 95 % confidence


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, from the order of the values alone.

    Each value is below the true median with probability 1/2, so a binomial distribution says between which of the
    ordered values the median lies. This assumes nothing about the distribution of the values, which has a long tail on
    a busy machine.

    Returns:
        Two of the values: as many are below the first as above the second, and the confidence is at least 95 %. With
        fewer than six values there is no such pair, and these are the smallest and the largest.

    Example:
        >>> interval(range(1, 21))  # of 20 values, the 6th and the 15th
        (6, 15)
    """
    ordered, below, skipped = sorted(values), 0.0, 0
    while (below := below + comb(len(ordered), skipped) / 2 ** len(ordered)) <= 0.025:
        skipped += 1
    return ordered[max(skipped - 1, 0)], ordered[len(ordered) - max(skipped, 1)]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The median of quotients, one per round, and the 95 % interval of the median."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, quotients: Sequence[float]) -> Ratio:
        low, high = interval(quotients)
        return cls(median=median(quotients), low=low, high=high)

    @classmethod
    def paired(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
        """Return the ratio of values that were measured in the same rounds."""
        return cls.of([a / b for a, b in zip(numerators, denominators, strict=True)])

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"
