"""Determines how many layers each virtual stage of a pipeline holds. This module needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

_EQUAL = 1 + 1e-9  # sums of equal costs differ by rounding


@lru_cache(maxsize=1024)
def even_stages(layers: int, stages: int, *, first: float = 0.0, least: int = 1) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage, as even as possible.

    Extra layers go to the inner stages first, since the first and the last stage hold the vocabulary.

    Args:
        layers: number of layers of the model.
        stages: number of virtual stages.
        first: the further load of the first stage, such as an encoder of images, in layers.
        least: the number of layers that the first stage must have.

    Raises:
        ValueError: there are more stages than layers, or too few layers for ``least``.

    Example:
        >>> even_stages(70, 12)
        (5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5)
        >>> even_stages(28, 4, first=3)
        (5, 8, 8, 7)
    """
    _check_enough(layers, stages)
    most = layers - (stages - 1)  # of the first stage
    if least > most:
        raise ValueError(
            f"the first {least} layers add features of a tower, which the first stage alone has, and {layers} layers "
            f"are too few for {stages} stages of which the first has {least}: pass a smaller pp or fewer chunks"
        )
    small, extra = divmod(layers, stages)
    # The last stage is the last to get an extra layer, since the head costs more than the embedding.
    order = sorted(range(stages), key=lambda i: (i == stages - 1, i == 0, i))
    counts = [small + (i in order[:extra]) for i in range(stages)]
    if stages == 1 or (not first and counts[0] >= least):
        return tuple(counts)

    def slowest(count: int) -> tuple[float, int]:
        return max(count + first, -(-(layers - count) // (stages - 1))), -count

    own = min(range(least, most + 1), key=slowest)
    small, extra = divmod(layers - own, stages - 1)
    return own, *(small + (i < extra) for i in range(stages - 1))


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


def check_stages(counts: Sequence[int], layers: int, stages: int, *, least: int = 1) -> tuple[int, ...]:
    """Check the numbers of layers that a user gave for the virtual stages, and return them.

    Args:
        counts: the layers of each virtual stage, in the order of the model.
        layers: number of layers of the model.
        stages: number of virtual stages, pp times the chunks of a rank.
        least: the number of layers that the first stage must have.

    Raises:
        ValueError: they are not one for each stage, one is below 1, the first is below ``least``, or they do not add up
            to ``layers``.

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
    if counts[0] < least:
        nearest = even_stages(layers, stages, least=least)
        raise ValueError(
            f"stages={counts} has {counts[0]} layers on the first stage, but the first {least} layers add features of "
            f"a tower, which the first stage alone has: change stages, as in stages={nearest}"
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
