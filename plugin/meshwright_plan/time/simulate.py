"""Simulation of a pipeline schedule, since a closed formula for the bubble is wrong for uneven stages.

The simulated lists of operations are those that the runtime executes, from ``meshwright.plan.schedule``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.plan.schedule import Kind, rank_of_stage, rank_operations

_KINDS = tuple(Kind)
_PERIODS = 8  # the schedule is periodic after _PERIODS x ranks micro-batches, even if the last stage is slower
_Step = tuple[int, int, int, int, bool]  # rank, kind, virtual stage, index of the step it waits for, over the network?


@dataclass(frozen=True, kw_only=True)
class SimulatedPipeline:
    """A schedule, and the seconds of one micro-batch on each of its virtual stages.

    Args:
        schedule: one of ``meshwright.plan.schedule.SCHEDULES``.
        ranks: number of ranks in the pipeline.
        forward: seconds of the forward on each virtual stage.
        input_grad: seconds of the backward on each virtual stage, without the gradients of the weights.
        weight_grad: seconds of the gradients of the weights on each virtual stage.
        transfer: seconds to send activations, or their gradient, to another rank.

    Example:
        >>> ones = (1.0, 1.0)
        >>> SimulatedPipeline(schedule="1f1b", ranks=2, forward=ones, input_grad=ones, weight_grad=ones).chunks
        1
    """

    schedule: str
    ranks: int
    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    transfer: float = 0.0

    @property
    def chunks(self) -> int:
        return len(self.forward) // self.ranks


def pipeline_time(pipeline: SimulatedPipeline, micro_batches: int) -> float:
    """Return the seconds from the first forward to the end of the last operation of a step.

    Args:
        pipeline: the schedule and its times.
        micro_batches: micro-batches per step.

    Example:
        >>> ones = (1.0, 1.0)
        >>> two = SimulatedPipeline(schedule="1f1b", ranks=2, forward=ones, input_grad=ones, weight_grad=ones)
        >>> pipeline_time(two, 4)
        15.0
    """
    # Between warm-up and drain a schedule repeats itself, so its time is extrapolated from two shorter schedules.
    period = pipeline.ranks
    short = period * _PERIODS
    if micro_batches > short + period:
        rest = micro_batches % period
        base = _end(pipeline, short + rest)
        longer = _end(pipeline, short + rest + period)
        return base + (micro_batches - short - rest) // period * (longer - base)
    return _end(pipeline, micro_batches)


@lru_cache(maxsize=4096)  # plans that differ in dp or ZeRO alone have equal pipelines
def _end(pipeline: SimulatedPipeline, micro_batches: int) -> float:
    """Return when the last step of ``_steps`` ends."""
    return max(_ends(pipeline, micro_batches))


def _seconds(pipeline: SimulatedPipeline) -> list[tuple[float, ...]]:
    """Return the seconds of each virtual stage, by kind of operation."""
    whole = tuple(i + w for i, w in zip(pipeline.input_grad, pipeline.weight_grad, strict=True))
    of_kind = {
        Kind.FORWARD: pipeline.forward,
        Kind.BACKWARD: whole,
        Kind.INPUT_GRAD: pipeline.input_grad,
        Kind.WEIGHT_GRAD: pipeline.weight_grad,
    }
    return [of_kind[kind] for kind in _KINDS]


def _ends(pipeline: SimulatedPipeline, micro_batches: int) -> list[float]:
    """Return when each step of ``_steps`` ends."""
    seconds, transfer = _seconds(pipeline), pipeline.transfer
    clock = [0.0] * pipeline.ranks
    ends: list[float] = []
    for rank, kind, stage, source, is_sent in _steps(pipeline.schedule, pipeline.ranks, pipeline.chunks, micro_batches):
        start = clock[rank]
        if source >= 0:
            ready = ends[source] + transfer if is_sent else ends[source]
            if ready > start:
                start = ready
        clock[rank] = start + seconds[kind][stage]
        ends.append(clock[rank])
    return ends


@lru_cache(maxsize=32)
def _steps(schedule: str, p: int, v: int, m: int) -> tuple[_Step, ...]:
    """Return the operations of all ranks in an order in which each follows the one that makes its input.

    Whatever the times are, they can be computed in this order.
    """
    lists = rank_operations(schedule, p, v, m)
    last = p * v - 1
    steps: list[_Step] = []
    made: dict[tuple[bool, int, int], int] = {}  # (is forward, virtual stage, micro-batch) -> index of its step
    cursor = [0] * p
    is_stuck = False
    while not is_stuck:
        is_stuck = True
        for rank, operations in enumerate(lists):
            while cursor[rank] < len(operations):
                operation = operations[cursor[rank]]
                stage, is_forward = operation.stage, operation.kind is Kind.FORWARD
                source, is_sent = -1, False
                if operation.kind is not Kind.WEIGHT_GRAD and not (is_forward and stage == 0):
                    # A forward needs the activations of the stage before, a backward the gradient of the stage after.
                    # The last stage's backward follows its own forward.
                    before = stage - 1 if is_forward else stage if stage == last else stage + 1
                    found = made.get((is_forward or stage == last, before, operation.micro_batch))
                    if found is None:
                        break
                    source, is_sent = found, rank_of_stage(schedule, before, p) != rank
                if operation.kind is not Kind.WEIGHT_GRAD:
                    made[is_forward, stage, operation.micro_batch] = len(steps)
                steps.append((rank, _KINDS.index(operation.kind), stage, source, is_sent))
                cursor[rank] += 1
                is_stuck = False
    assert len(steps) == sum(map(len, lists)), f"{schedule} with p={p}, v={v}, m={m} has a deadlock"
    return tuple(steps)
