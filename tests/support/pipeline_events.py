"""The operations of a simulated step with their times, for comparison with what the page's script draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.plan.schedule import Operation, rank_operations
from meshwright_plan.time import simulate
from meshwright_plan.time.simulate import SimulatedPipeline


@dataclass(frozen=True, kw_only=True)
class Event:
    """One operation of a simulated schedule.

    Args:
        rank: the rank that runs it.
        operation: what it runs.
        start, end: seconds since the step began.
    """

    rank: int
    operation: Operation
    start: float
    end: float


def pipeline_events(pipeline: SimulatedPipeline, micro_batches: int) -> Iterator[Event]:
    """Yield every operation of a step, rank by rank, in the order in which the rank runs them.

    Args:
        pipeline, micro_batches: as in ``pipeline_time``.
    """
    steps = simulate._steps(pipeline.schedule, pipeline.ranks, pipeline.chunks, micro_batches)
    ends = simulate._ends(pipeline, micro_batches)
    seconds = simulate._seconds(pipeline)
    by_rank: list[list[tuple[float, float]]] = [[] for _ in range(pipeline.ranks)]
    for (rank, kind, stage, _, _), end in zip(steps, ends, strict=True):
        by_rank[rank].append((end - seconds[kind][stage], end))
    lists = rank_operations(pipeline.schedule, pipeline.ranks, pipeline.chunks, micro_batches)
    for rank, operations in enumerate(lists):
        for operation, (start, end) in zip(operations, by_rank[rank], strict=True):
            yield Event(rank=rank, operation=operation, start=start, end=end)
