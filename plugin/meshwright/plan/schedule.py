"""Pipeline schedules as lists of operations, and the tensors that they send. The planner simulates the same lists that
the runtime executes.

The model's layers are cut into ``p * v`` virtual stages: ``p`` ranks hold ``v`` of them each. A schedule says in which
order each rank runs the forwards and backwards of ``m`` micro-batches on its stages. The orders are those of
torch.distributed.pipelining. This module needs no torch.

This module needs no torch.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
SPLIT_BACKWARD = frozenset({"zb-h1", "zbv"})  # schedules that compute the gradients of weights apart


class Kind(enum.Enum):
    """What an operation computes; a ``BACKWARD`` is an ``INPUT_GRAD`` and a ``WEIGHT_GRAD`` in one."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"

    __hash__ = object.__hash__  # Enum's own is slow, and building a schedule mostly computes hashes


_F, _B, _I, _W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD
_Moment = tuple[tuple[int, int], ...]  # for each stage of a rank, how many micro-batches wait for backward and for W
_Visit = tuple[Kind, int]  # what to compute, on which virtual stage


@dataclass(frozen=True, slots=True)
class Operation:
    """One computation of a schedule.

    Args:
        kind: what it computes.
        stage: the virtual stage, from 0 (embedding) to ``p * v - 1`` (head and loss).
        micro_batch: index of the micro-batch.

    Example:
        >>> str(Operation(Kind.FORWARD, stage=2, micro_batch=0))
        '2F0'
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


def rank_of_stage(schedule: str, stage: int, p: int) -> int:
    """Return the rank that holds a virtual stage.

    Args:
        schedule: one of ``SCHEDULES``.
        stage: the virtual stage.
        p: number of ranks in the pipeline.

    Example:
        >>> [[rank_of_stage(schedule, stage, 2) for stage in range(4)] for schedule in ("interleaved", "zbv")]
        [[0, 1, 0, 1], [0, 1, 1, 0]]
    """
    if schedule == "zbv":
        return stage if stage < p else 2 * p - 1 - stage
    return stage % p


@lru_cache(maxsize=4096)
def stages_of_rank(schedule: str, rank: int, p: int, v: int) -> tuple[int, ...]:
    """Return the virtual stages that a rank holds, in the order of the layers.

    Args:
        schedule: one of ``SCHEDULES``.
        rank: the rank in the pipeline.
        p: number of ranks in the pipeline.
        v: virtual stages of a rank.

    Example:
        >>> stages_of_rank("interleaved", 1, 4, 2), stages_of_rank("zbv", 1, 4, 2)
        ((1, 5), (1, 6))
    """
    return tuple(stage for stage in range(p * v) if rank_of_stage(schedule, stage, p) == rank)


@lru_cache(maxsize=64, typed=True)
def chunks_of(schedule: str, chunks: int | None = None) -> int:
    """Return how many virtual stages a rank holds under a schedule.

    Args:
        schedule: one of ``SCHEDULES``.
        chunks: the number that the user asked for; None for the schedule's own: 2 for "interleaved" and "zbv", else 1.

    Raises:
        ValueError: the schedule is unknown, or cannot have that many.

    Example:
        >>> chunks_of("interleaved", 3), chunks_of("zbv"), chunks_of("1f1b")
        (3, 2, 1)
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} must be one of {', '.join(map(repr, SCHEDULES))}")
    own = 2 if schedule in ("interleaved", "zbv") else 1
    if chunks is None:
        return own
    if isinstance(chunks, bool) or not isinstance(chunks, int):
        raise ValueError(f"chunks={chunks!r} must be a whole number: how many stages of the model each rank has")
    if schedule == "interleaved" and chunks < 2:
        raise ValueError(
            f"schedule='interleaved' needs at least 2 stages on each rank, but chunks={chunks}: pass chunks=2, or "
            "schedule='1f1b' for one stage on each rank"
        )
    if schedule != "interleaved" and chunks != own:
        raise ValueError(
            f"schedule={schedule!r} has {own} stage{'s' if own > 1 else ''} on each rank, but chunks={chunks}: pass "
            f"chunks={own}, or schedule='interleaved' for chunks={max(2, chunks)}"
        )
    return chunks


def check(schedule: str, p: int, v: int, m: int) -> None:
    """Check that a schedule exists for these sizes.

    Args:
        schedule: one of ``SCHEDULES``.
        p: number of ranks in the pipeline.
        v: virtual stages of a rank.
        m: number of micro-batches of a step.

    Raises:
        ValueError: there is no such schedule; the message says which sizes come nearest.

    Example:
        >>> check("1f1b", p=4, v=1, m=2)
    """
    chunks_of(schedule, v)
    if p < 1:
        raise ValueError(f"pp={p} must be at least 1")
    if m < 1:
        raise ValueError(f"the number of micro-batches is {m}, but must be at least 1")
    if schedule == "interleaved" and m % p:
        near = " or ".join(str(count) for count in (m // p * p, m // p * p + p) if count)
        raise ValueError(
            f"schedule='interleaved' with pp={p} runs micro-batches in groups of {p}, but {m} micro-batches are not a "
            f"multiple of {p}: choose micro_batch_size such that a step has {near} micro-batches, or pass "
            "schedule='1f1b'"
        )


@lru_cache(maxsize=32)
def rank_operations(schedule: str, p: int, v: int, m: int) -> tuple[tuple[Operation, ...], ...]:
    """Return the operations of every rank, each in the order in which the rank runs them.

    Args:
        schedule: one of ``SCHEDULES``.
        p: number of ranks in the pipeline.
        v: virtual stages of a rank.
        m: number of micro-batches of a step.

    Raises:
        ValueError: there is no such schedule for these sizes.

    Example:
        >>> for operations in rank_operations("1f1b", 2, 1, 3):
        ...     print(*operations)
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    check(schedule, p, v, m)
    visits = _GENERATORS[schedule]
    return tuple(_numbered(visits(rank, p, v, m), m) for rank in range(p))


@lru_cache(maxsize=1024)
def most_held(schedule: str, p: int, v: int, m: int) -> tuple[tuple[_Moment, ...], ...]:
    """Return what each rank holds at its fullest moments: for each of its stages, two numbers of micro-batches.

    The first number counts micro-batches whose activations wait for their backward, the second those of which only the
    gradients of the weights are missing. A moment is left out if another one exceeds it in every number.

    Args:
        schedule: one of ``SCHEDULES``.
        p: number of ranks in the pipeline.
        v: virtual stages of a rank.
        m: number of micro-batches of a step.

    Example:
        >>> most_held("1f1b", 2, 1, 4)
        ((((2, 0),),), (((1, 0),),))
        >>> most_held("zb-h1", 2, 1, 4)[1]
        (((1, 1),),)
    """
    fullest = []
    for rank, operations in enumerate(rank_operations(schedule, p, v, m)):
        stages = stages_of_rank(schedule, rank, p, v)
        held = {stage: [0, 0] for stage in stages}
        moments = set()
        for operation, following in itertools.zip_longest(operations, operations[1:]):
            counts = held[operation.stage]
            if operation.kind is Kind.FORWARD:
                counts[0] += 1
                if following is None or following.kind is not Kind.FORWARD:  # the next forward holds more
                    moments.add(tuple((active, waiting) for active, waiting in held.values()))
            elif operation.kind is Kind.WEIGHT_GRAD:
                counts[1] -= 1
            else:
                counts[0] -= 1
                counts[1] += operation.kind is Kind.INPUT_GRAD
        fullest.append(tuple(sorted(one for one in moments if not any(_exceeds(two, one) for two in moments))))
    return tuple(fullest)


def _exceeds(one: _Moment, other: _Moment) -> bool:
    pairs = [pair for both in zip(one, other, strict=True) for pair in zip(*both, strict=True)]
    return one != other and all(mine >= theirs for mine, theirs in pairs)


def _numbered(visits: Sequence[_Visit], m: int) -> tuple[Operation, ...]:
    """Give each visit its micro-batch: a stage runs the same kind for one micro-batch after the other."""
    count: dict[_Visit, int] = {}
    operations = []
    for visit in visits:
        micro_batch = count[visit] = count.get(visit, -1) + 1
        if micro_batch < m:
            operations.append(Operation(*visit, micro_batch))
    return tuple(operations)


def _gpipe(rank: int, p: int, v: int, m: int) -> list[_Visit]:
    return [(_F, rank)] * m + [(_B, rank)] * m


def _one_forward_one_backward(rank: int, p: int, v: int, m: int) -> list[_Visit]:
    warm = min(p - 1 - rank, m)
    return [(_F, rank)] * warm + [(_F, rank), (_B, rank)] * (m - warm) + [(_B, rank)] * warm


def _interleaved(rank: int, p: int, v: int, m: int) -> list[_Visit]:
    """Megatron-LM's order (Narayanan et al. 2021): groups of ``p`` micro-batches go through the stages of the rank."""
    stages = stages_of_rank("interleaved", rank, p, v)
    forwards = [(_F, stage) for stage in stages for _ in range(p)] * (m // p)
    backwards = [(_B, stage) for stage in reversed(stages) for _ in range(p)] * (m // p)
    warm = min(2 * (p - 1 - rank) + (v - 1) * p, m * v)
    steady = [visit for pair in zip(forwards[warm:], backwards, strict=False) for visit in pair]
    return forwards[:warm] + steady + backwards[m * v - warm :]


def _zero_bubble_h1(rank: int, p: int, v: int, m: int) -> list[_Visit]:
    """1F1B with late weight gradients (Qi et al. 2024): up to r of them wait on rank r, the last until cool-down."""
    warm = min(p - 1 - rank, m)
    visits = [(_F, rank)] * warm
    for index in range(m):
        visits += [(_F, rank)] * (index < m - warm) + [(_I, rank)] + [(_W, rank)] * (index >= rank)
    return visits + [(_W, rank)] * min(rank, m)


def _zero_bubble_v(rank: int, p: int, v: int, m: int) -> list[_Visit]:
    """ZB-V (Qi et al. 2024): the stages go down the ranks and up again, so rank 0 holds the first and the last.

    The order is made for enough micro-batches to fill the pipeline. If there are fewer, the missing ones are left out.
    """
    enough = max(2 * p - 1, m)
    down, up = stages_of_rank("zbv", rank, p, v)
    paid_down = [(_I, down), (_W, down)]
    through_up = [(_F, up), (_I, up), (_W, up)]
    warm_up = [(_F, down)] * (2 * (p - rank) - 1) + [(_F, up), (_F, down)] * rank + through_up * (p - rank)
    steady = [(_F, down), *paid_down, *through_up] * (enough - 2 * p + rank + 1)
    drain = [*paid_down, *through_up] * (p - rank - 1)
    cool_down = [(_I, down), (_I, up)] * rank + paid_down * (p - rank) + [(_W, up)] * rank + [(_W, down)] * rank
    return warm_up + steady + drain + cool_down


_GENERATORS: dict[str, Callable[[int, int, int, int], list[_Visit]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble_h1,
    "zbv": _zero_bubble_v,
}


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
    stage = operation.stage + (1 if operation.kind is Kind.FORWARD else -1)
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
    source = {one.key: (sender, index) for (sender, _), made in sent.items() for index, one in enumerate(made)}
    found: dict[_Pair, list[int]] = {pair: [] for pair in sent}
    for rank, operations in enumerate(rank_operations(schedule, p, v, m)):
        received = dict.fromkeys(range(p), 0)
        for operation in operations:
            key = operation.kind is Kind.FORWARD, operation.stage, operation.micro_batch
            if key in source:  # transfers of one pair arrive in the order in which they are sent
                sender, index = source[key]
                received[sender] = max(received[sender], index + 1)
            target = receiving_stage(operation, p * v)
            if target is not None and (receiver := rank_of_stage(schedule, target, p)) != rank:
                found[rank, receiver].append(received[receiver])
    return {pair: tuple(counts) for pair, counts in found.items()}
