"""Event simulation of a pipeline schedule, since a closed formula for the bubble is wrong for uneven stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

Op = tuple[bool, int, int]  # (is forward, chunk on this stage, micro-batch)
_Ready = list[list[float]]  # arrival times of the inputs, by virtual stage and micro-batch


@dataclass(frozen=True, kw_only=True)
class Event:
    """One forward or backward of a schedule.

    Args:
        stage: index of the pipeline stage.
        chunk: index of the stage's chunk of layers.
        micro_batch: index of the micro-batch.
        is_forward: whether the event is a forward; if not, it is a backward.
        start, end: seconds since the step began.
    """

    stage: int
    chunk: int
    micro_batch: int
    is_forward: bool
    start: float
    end: float


@lru_cache(maxsize=256)
def stage_order(stage: int, stages: int, micro_batches: int, interleave: int = 1) -> tuple[Op, ...]:
    """Return the order in which one stage runs its forwards and backwards: 1F1B, or interleaved 1F1B.

    The interleaved order is Megatron-LM's (Narayanan et al. 2021): micro-batches go through the chunks in groups of
    ``stages`` micro-batches.

    Example:
        >>> [("F" if forward else "B") + str(micro) for forward, _, micro in stage_order(1, 2, 3)]
        ['F0', 'B0', 'F1', 'B1', 'F2', 'B2']
    """
    total = micro_batches * interleave
    if interleave == 1:
        warm = min(stages - stage - 1, total)
    else:
        warm = min(total, 2 * (stages - stage - 1) + (interleave - 1) * stages)
    width = stages if interleave > 1 else micro_batches
    visits = [
        (chunk, micro)
        for start in range(0, micro_batches, width)
        for chunk in range(interleave)
        for micro in range(start, min(start + width, micro_batches))
    ]
    forwards: list[Op] = [(True, chunk, micro) for chunk, micro in visits]
    backwards: list[Op] = [(False, interleave - 1 - chunk, micro) for chunk, micro in visits]
    steady = itertools.chain.from_iterable(zip(forwards[warm:], backwards, strict=False))
    return (*forwards[:warm], *steady, *backwards[total - warm :])


def pipeline_time(
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    *,
    interleave: int = 1,
    transfer: float = 0.0,
) -> float:
    """Return the seconds from the first forward to the last backward of a pipeline.

    Args:
        forward: seconds of one micro-batch's forward on each stage, summed over the stage's chunks.
        backward: seconds of one micro-batch's backward on each stage, summed over the stage's chunks.
        micro_batches: micro-batches per step.
        interleave: chunks per stage.
        transfer: seconds to send activations to the next stage.

    Example:
        >>> pipeline_time([1.0, 1.0], [2.0, 2.0], 4)
        15.0
    """
    stages = len(forward)
    if stages == 1:
        return micro_batches * (forward[0] + backward[0])
    # Between warm-up and drain a schedule repeats itself, so its time is extrapolated from two shorter schedules.
    short = stages * max(4, 12 // interleave)
    if micro_batches > short + stages:
        rest = micro_batches % stages
        base = _simulate(tuple(forward), tuple(backward), short + rest, interleave, transfer)
        longer = _simulate(tuple(forward), tuple(backward), short + rest + stages, interleave, transfer)
        return base + (micro_batches - short - rest) // stages * (longer - base)
    return _simulate(tuple(forward), tuple(backward), micro_batches, interleave, transfer)


def pipeline_events(
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    *,
    interleave: int = 1,
    transfer: float = 0.0,
) -> Iterator[Event]:
    """Yield every forward and backward of a schedule, stage by stage, in the order in which the stage runs them.

    Args:
        forward, backward, micro_batches, interleave, transfer: as in ``pipeline_time``.

    Example:
        >>> events = list(pipeline_events([1.0, 1.0], [2.0, 2.0], 4))
        >>> len(events), max(event.end for event in events)
        (16, 15.0)
    """
    stages = len(forward)
    _, ready_f, ready_b = _run(tuple(forward), tuple(backward), micro_batches, interleave, transfer)
    for stage in range(stages):
        now = 0.0
        for is_forward, chunk, micro in stage_order(stage, stages, micro_batches, interleave):
            start = max(now, (ready_f if is_forward else ready_b)[chunk * stages + stage][micro])
            now = start + (forward if is_forward else backward)[stage] / interleave
            yield Event(stage=stage, chunk=chunk, micro_batch=micro, is_forward=is_forward, start=start, end=now)


def _simulate(
    forward: tuple[float, ...], backward: tuple[float, ...], micro_batches: int, interleave: int, transfer: float
) -> float:
    return _run(forward, backward, micro_batches, interleave, transfer)[0]


def _run(
    forward: tuple[float, ...], backward: tuple[float, ...], micro_batches: int, interleave: int, transfer: float
) -> tuple[float, _Ready, _Ready]:
    stages = len(forward)
    orders = [stage_order(stage, stages, micro_batches, interleave) for stage in range(stages)]
    last = stages * interleave - 1
    # The first forward and the first backward of each micro-batch need no transfer.
    ready_forward = [[-1.0] * micro_batches for _ in range(last + 1)]
    ready_backward = [[-1.0] * micro_batches for _ in range(last + 1)]
    ready_forward[0] = [0.0] * micro_batches
    clock = [0.0] * stages
    cursor = [0] * stages
    left = sum(len(order) for order in orders)
    times_f = [value / interleave for value in forward]
    times_b = [value / interleave for value in backward]
    while left:
        before = left
        for stage in range(stages):
            order, at, now = orders[stage], cursor[stage], clock[stage]
            while at < len(order):
                is_forward, chunk, micro = order[at]
                virtual = chunk * stages + stage
                ready = (ready_forward if is_forward else ready_backward)[virtual][micro]
                if ready < 0:
                    break
                now = max(now, ready) + (times_f[stage] if is_forward else times_b[stage])
                if is_forward:
                    if virtual < last:
                        ready_forward[virtual + 1][micro] = now + transfer
                    else:
                        ready_backward[virtual][micro] = now
                elif virtual:
                    ready_backward[virtual - 1][micro] = now + transfer
                at += 1
            left -= at - cursor[stage]
            cursor[stage], clock[stage] = at, now
        if left == before:
            raise AssertionError("the pipeline schedule has a deadlock")
    return max(clock), ready_forward, ready_backward
