"""Measures the bytes that a rank holds after each operation of a step, against the count of its schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from meshwright.parallel.fake_passes.measured_shape import LiveBytes
from meshwright.parallel.gradients.summed import SummedGradients
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.pipeline.executor import Step, WeightGradients
from meshwright.plan.schedule import Kind, Operation


@dataclass(kw_only=True)
class Held:
    """The bytes held on one rank in a step, without weights, sums of gradients and receives that were posted ahead.

    Args:
        operations: the operations that ran, in order.
        after: the bytes after each of them.
    """

    operations: list[Operation] = field(default_factory=list)
    after: list[int] = field(default_factory=list)

    def counted(self) -> list[int]:
        """Return the bytes after each operation as counted: what one micro-batch holds, times the micro-batches held.

        What a micro-batch holds on a stage is taken from the stage's first operations: its first forward, and the first
        backward whose gradients of weights wait.
        """
        differences = [now - before for now, before in zip(self.after, [0, *self.after], strict=False)]
        cost: dict[tuple[Kind, int], int] = {}
        for operation, difference in zip(self.operations, differences, strict=True):
            cost.setdefault((operation.kind, operation.stage), difference)
        counted, now = [], 0
        for operation in self.operations:
            kind, stage = operation.kind, operation.stage
            forward, waiting = cost[Kind.FORWARD, stage], cost.get((Kind.INPUT_GRAD, stage), 0)
            now += {
                Kind.FORWARD: forward,
                Kind.BACKWARD: -forward,
                Kind.INPUT_GRAD: waiting,
                Kind.WEIGHT_GRAD: -forward - waiting,
            }[kind]
            counted.append(now)
        return counted


@contextlib.contextmanager
def holding(model: Any, batches: Sequence[dict[str, Any]]) -> Iterator[list[Held]]:
    """Record what a rank holds in each training step inside the context.

    Args:
        model: the distributed model.
        batches: the batches of the steps.
    """
    steps: list[Held] = []
    with reading_shards():
        known = [*model.parameters(), *model.buffers(), *(x for batch in batches for x in batch.values())]
    memory = LiveBytes(known)
    current: dict[str, Any] = {}

    def opened(step: Step, *, trains: bool) -> None:
        steps.append(Held())
        current.update(step=step, base=memory.now, sums=0)
        open_step(step, trains=trains)

    def record(operation: Operation) -> None:
        receivers = current["step"]._receivers.values()
        posted = sum(x.nbytes for receiver in receivers for found in receiver._posted.values() for _, x in found)
        steps[-1].operations.append(operation)
        steps[-1].after.append(memory.now - current["base"] - current["sums"] - posted)

    def forward(step: Step, stage: int, micro_batch: int, *, trains: bool) -> None:
        run_forward(step, stage, micro_batch, trains=trains)
        record(Operation(Kind.FORWARD, stage, micro_batch))

    def backward(step: Step, operation: Operation, sums: SummedGradients, later: WeightGradients) -> None:
        run_backward(step, operation, sums, later)
        current["sums"] = sum(x.nbytes for x in sums._sums.values())
        record(operation)

    def add_to(later: WeightGradients, sums: SummedGradients, stage: int, micro_batch: int) -> None:
        add_weights(later, sums, stage, micro_batch)
        current["sums"] = sum(x.nbytes for x in sums._sums.values())
        record(Operation(Kind.WEIGHT_GRAD, stage, micro_batch))

    open_step, run_forward, run_backward = Step.open, Step.forward, Step.backward
    add_weights = WeightGradients.add_to
    with (
        mock.patch.object(Step, "open", opened),
        mock.patch.object(Step, "forward", forward),
        mock.patch.object(Step, "backward", backward),
        mock.patch.object(WeightGradients, "add_to", add_to),
        memory,
    ):
        yield steps
