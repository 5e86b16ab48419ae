"""The tensors that the ranks of a pipeline send, derived from their operations. This module needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.plan.schedule import Kind, Operation, rank_of_stage, rank_operations

_Pair = tuple[int, int]  # sender, receiver


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that one rank sends to another.

    Args:
        operation: the operation that makes it: a forward makes activations, a backward the gradient of its input.
        stage: the virtual stage that receives it.
    """

    operation: Operation
    stage: int

    @property
    def key(self) -> tuple[bool, int, int]:
        """The identity of the transfer: whether it holds activations, its stage and its micro-batch."""
        return self.is_forward, self.stage, self.micro_batch

    @property
    def micro_batch(self) -> int:
        return self.operation.micro_batch

    @property
    def is_forward(self) -> bool:
        """Whether it holds activations; if not, it holds a gradient."""
        return self.operation.kind is Kind.FORWARD


def receiving_stage(operation: Operation, stages: int) -> int | None:
    """Return the virtual stage that needs what an operation makes; None if no other stage does.

    Args:
        operation: the operation.
        stages: number of virtual stages.

    Example:
        >>> receiving_stage(Operation(Kind.FORWARD, 2, 0), 4), receiving_stage(Operation(Kind.FORWARD, 3, 0), 4)
        (3, None)
    """
    return _neighbour(operation, 1 if operation.kind is Kind.FORWARD else -1, stages)


def needed_stage(operation: Operation, stages: int) -> int | None:
    """Return the virtual stage that makes what an operation needs; None if no other stage does.

    Args:
        operation: the operation.
        stages: number of virtual stages.

    Example:
        >>> needed_stage(Operation(Kind.FORWARD, 2, 0), 4), needed_stage(Operation(Kind.INPUT_GRAD, 2, 0), 4)
        (1, 3)
    """
    return _neighbour(operation, -1 if operation.kind is Kind.FORWARD else 1, stages)


def _neighbour(operation: Operation, step: int, stages: int) -> int | None:
    stage = operation.stage + step
    return stage if operation.kind is not Kind.WEIGHT_GRAD and 0 <= stage < stages else None


@lru_cache(maxsize=128)
def transfers(schedule: str, p: int, v: int, m: int) -> dict[_Pair, tuple[Transfer, ...]]:
    """Return what each rank sends to each other rank, by (sender, receiver), in the order in which it is sent.

    A receiver that posts its receives in this order needs no tags. What stays on one rank is not listed.

    Args:
        schedule: one of ``SCHEDULES``.
        p: number of ranks in the pipeline.
        v: virtual stages of a rank.
        m: number of micro-batches of a step.

    Example:
        >>> sent = transfers("1f1b", 2, 1, 2)
        >>> [(str(one.operation), one.stage) for one in sent[0, 1]], [str(one.operation) for one in sent[1, 0]]
        ([('0F0', 1), ('0F1', 1)], ['1B0', '1B1'])
    """
    sent: dict[_Pair, list[Transfer]] = {}
    for rank, operations in enumerate(rank_operations(schedule, p, v, m)):
        for operation in operations:
            stage = receiving_stage(operation, p * v)
            if stage is None:
                continue
            receiver = rank_of_stage(schedule, stage, p)
            if receiver != rank:
                sent.setdefault((rank, receiver), []).append(Transfer(operation, stage))
    return {pair: tuple(made) for pair, made in sent.items()}


@lru_cache(maxsize=128)
def received_by(schedule: str, p: int, v: int, m: int) -> dict[_Pair, tuple[int, ...]]:
    """Return, for each transfer of ``transfers``, how many transfers from its receiver its sender has received by then.

    A rank that gets a transfer knows from it how many of its own have arrived, and need not be kept any longer.

    Args:
        schedule: one of ``SCHEDULES``.
        p: number of ranks in the pipeline.
        v: virtual stages of a rank.
        m: number of micro-batches of a step.

    Example:
        >>> received_by("1f1b", 2, 1, 3)  # each gradient of rank 1 follows the activations of its micro-batch
        {(0, 1): (0, 0, 1), (1, 0): (1, 2, 3)}
    """
    sent = transfers(schedule, p, v, m)
    place = {(pair, transfer.key): index for pair, made in sent.items() for index, transfer in enumerate(made)}
    found: dict[_Pair, list[int]] = {pair: [] for pair in sent}
    for rank, operations in enumerate(rank_operations(schedule, p, v, m)):
        received = dict.fromkeys(range(p), 0)
        for operation in operations:
            source = needed_stage(operation, p * v)
            if source is not None and (sender := rank_of_stage(schedule, source, p)) != rank:
                key = operation.kind is Kind.FORWARD, operation.stage, operation.micro_batch
                # Transfers of one pair arrive in the order in which they are sent.
                received[sender] = max(received[sender], place[(sender, rank), key] + 1)
            target = receiving_stage(operation, p * v)
            if target is not None and (receiver := rank_of_stage(schedule, target, p)) != rank:
                found[rank, receiver].append(received[receiver])
    return {pair: tuple(counts) for pair, counts in found.items()}
