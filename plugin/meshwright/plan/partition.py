"""Determines how many layers each virtual stage of a pipeline holds. This module needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

_EQUAL = 1 + 1e-9  # sums of equal costs differ by rounding


@lru_cache(maxsize=1024)
def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage, as even as possible.

    Extra layers go to the inner stages first, since the first and the last stage hold the vocabulary.

    Args:
        layers: number of layers of the model.
        stages: number of virtual stages.

    Raises:
        ValueError: there are more stages than layers.

    Example:
        >>> even_stages(70, 12)
        (5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5)
    """
    _check_enough(layers, stages)
    small, extra = divmod(layers, stages)
    counts = [small] * stages
    # The last stage is the last to get an extra layer, since the head costs more than the embedding.
    for index in sorted(range(stages), key=lambda i: (i == stages - 1, i == 0, i))[:extra]:
        counts[index] += 1
    return tuple(counts)


def balanced_stages(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage such that the slowest stage is as fast as possible.

    Among partitions with the same slowest stage, the function returns the one with the least sum of squares, which is
    the most even.

    Args:
        costs: the cost of each layer, such as its seconds of forward and backward.
        stages: number of virtual stages.
        first: the further cost of the first stage (embedding).
        last: the further cost of the last stage (head and loss).

    Raises:
        ValueError: there are more stages than layers, or a cost is negative.

    Example:
        >>> balanced_stages([1.0] * 8, 4, last=1.5)
        (3, 2, 2, 1)
        >>> balanced_stages([1.0, 1.0, 4.0, 1.0, 1.0], 3)
        (2, 1, 2)
    """
    _check_enough(len(costs), stages)
    if min(*costs, first, last) < 0:
        raise ValueError(f"the costs of layers must not be negative, but one is {min(*costs, first, last)}")
    return _balanced(tuple(costs), stages, first, last)


def check_stages(counts: Sequence[int], layers: int, stages: int) -> tuple[int, ...]:
    """Check the numbers of layers that a user gave for the virtual stages, and return them.

    Args:
        counts: the layers of each virtual stage, in the order of the model.
        layers: number of layers of the model.
        stages: number of virtual stages, pp times the chunks of a rank.

    Raises:
        ValueError: they are not one for each stage, one is below 1, or they do not add up to ``layers``.

    Example:
        >>> check_stages([1, 2, 2, 1], layers=6, stages=4)
        (1, 2, 2, 1)
    """
    counts = tuple(counts)
    if len(counts) != stages:
        raise ValueError(
            f"stages={counts} has {len(counts)} numbers, but pp and the schedule make {stages} stages: give each of "
            f"the {stages} stages its number of layers, as in stages={_nearest(layers, stages)}"
        )
    for index, count in enumerate(counts):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"stages={counts}: stage {index} has {count!r} layers, but needs at least 1")
    if sum(counts) != layers:
        raise ValueError(
            f"stages={counts} has {sum(counts)} layers, but the model has {layers}: change stages such that they add "
            f"up, as in stages={_nearest(layers, stages)}"
        )
    return counts


def _nearest(layers: int, stages: int) -> str:
    return str(even_stages(layers, stages)) if stages <= layers else f"(...), for which {layers} layers are too few"


def _check_enough(layers: int, stages: int) -> None:
    if stages > layers:
        raise ValueError(
            f"the model's {layers} layers are fewer than the {stages} stages of the pipeline: pass a smaller pp or "
            "fewer chunks"
        )


@lru_cache(maxsize=1024)
def _balanced(costs: tuple[float, ...], stages: int, first: float, last: float) -> tuple[int, ...]:
    count = len(costs)
    before = [0.0, *itertools.accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        ends = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        return before[end] - before[start] + ends

    # best[end]: the least cost of the slowest stage, of the partitions of the first ``end`` layers into the stages so
    # far. A later start makes the stage cheaper and the stages before it slower, so the search from the end stops at
    # the first start whose stage alone is too slow.
    best = [float("inf"), *(cost(0, 0, end) for end in range(1, count + 1))]
    for stage in range(1, stages):
        longer = [float("inf")] * (count + 1)
        for end in range(stage + 1, count + 1):
            for start in range(end - 1, stage - 1, -1):
                own = cost(stage, start, end)
                longer[end] = min(longer[end], max(best[start], own))
                if own >= longer[end]:
                    break
        best = longer
    limit = best[count] * _EQUAL

    # squares[end]: the least sum of squares among the partitions whose stages all stay below the limit.
    squares = [float("inf")] * (count + 1)
    for end in range(1, count + 1):
        squares[end] = cost(0, 0, end) ** 2 if cost(0, 0, end) <= limit else float("inf")
    cuts: list[list[int]] = []
    for stage in range(1, stages):
        longer, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count + 1):
            for start in range(end - 1, stage - 1, -1):
                own = cost(stage, start, end)
                if own > limit:
                    break
                if squares[start] + own**2 < longer[end]:
                    longer[end], cut[end] = squares[start] + own**2, start
        squares = longer
        cuts.append(cut)
    ends = [count]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    return tuple(end - start for start, end in itertools.pairwise([0, *reversed(ends)]))
