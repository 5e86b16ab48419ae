"""The interval of a median."""

from __future__ import annotations

from math import comb


def interval(ordered: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median of ordered values: all of them if there are fewer than six."""
    count, below, skipped = len(ordered), 0.0, 0
    while (below := below + comb(count, skipped) / 2**count) <= 0.025:
        skipped += 1
    return ordered[max(skipped - 1, 0)], ordered[count - max(skipped, 1)]
