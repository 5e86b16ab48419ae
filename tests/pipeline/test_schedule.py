"""The schedules are torch's, legal, and free of deadlocks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import PipelineStage, schedules

from meshwright.plan.schedule import (
    SCHEDULES,
    SPLIT_BACKWARD,
    Kind,
    Operation,
    Transfer,
    check,
    chunks_of,
    most_held,
    rank_of_stage,
    rank_operations,
    received_by,
    receiving_stage,
    stages_of_rank,
    transfers,
)

_KINDS = {
    "FORWARD": Kind.FORWARD,
    "FULL_BACKWARD": Kind.BACKWARD,
    "BACKWARD_INPUT": Kind.INPUT_GRAD,
    "BACKWARD_WEIGHT": Kind.WEIGHT_GRAD,
}
_TORCH = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb-h1": schedules.ScheduleInterleavedZeroBubble,  # with one stage a rank it is ZB-H1
    "zbv": schedules.ScheduleZBVZeroBubble,
}


def torch_operations(schedule: str, p: int, v: int, m: int) -> list[tuple[Operation, ...]]:
    stage = mock.Mock(spec=PipelineStage)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, p, p * v, None
    single = schedule in ("gpipe", "1f1b")
    # The communication that torch adds is slow to list, and is not compared.
    with mock.patch.object(schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms"):
        order = _TORCH[schedule](stage if single else [stage] * v, m).pipeline_order
    listed = []
    for rank in range(p):
        actions = [action for action in order[rank] if action is not None and action.computation_type.name in _KINDS]
        # torch's listing of 1F1B, not its execution, counts the forwards of the last rank from 1.
        late = int(schedule == "1f1b" and rank == p - 1)
        listed.append(
            tuple(
                Operation(kind, action.stage_index, action.microbatch_index - (late if kind is Kind.FORWARD else 0))
                for action in actions
                for kind in [_KINDS[action.computation_type.name]]
            )
        )
    return listed


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2)]
)
def test_schedules_are_those_of_torch(schedule, v, p):
    compared = []
    for m in range(1, 4 * p + 1):
        if schedule == "interleaved" and m % p:
            continue
        try:
            theirs = torch_operations(schedule, p, v, m)
        except ValueError:  # torch refuses some m that these schedules run: the tests below cover them
            continue
        assert list(rank_operations(schedule, p, v, m)) == theirs, m
        compared.append(m)
    accepted = {
        "interleaved": [p, 2 * p, 3 * p, 4 * p],
        "1f1b": list(range(p, 4 * p + 1)),
        "zb-h1": [m for m in range(1, 4 * p + 1) if m % max(1, m // p) == 0],
    }
    assert compared == accepted.get(schedule, list(range(1, 4 * p + 1)))


@st.composite
def sizes(draw: Any) -> tuple[str, int, int, int]:
    schedule = draw(st.sampled_from(SCHEDULES))
    p = draw(st.integers(1, 6))
    if schedule != "interleaved":
        return schedule, p, chunks_of(schedule), draw(st.integers(1, 4 * p))
    return schedule, p, draw(st.integers(2, 4)), p * draw(st.integers(1, 3))


@settings(deadline=None)
@given(sizes())
def test_each_stage_computes_each_micro_batch_once(size: tuple[str, int, int, int]) -> None:
    schedule, p, v, m = size
    kinds = [Kind.FORWARD, Kind.BACKWARD]
    if schedule in SPLIT_BACKWARD:
        kinds = [Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD]
    lists = rank_operations(*size)
    held = [stages_of_rank(schedule, rank, p, v) for rank in range(p)]
    assert sorted(stage for stages in held for stage in stages) == list(range(p * v))
    for rank, operations in enumerate(lists):
        wanted = {Operation(kind, stage, i) for kind in kinds for stage in held[rank] for i in range(m)}
        assert len(operations) == len(wanted)
        assert set(operations) == wanted
        # Sums of gradients must have the same bits whatever the schedule is.
        for kind in kinds:
            for stage in held[rank]:
                order = [one.micro_batch for one in operations if (one.kind, one.stage) == (kind, stage)]
                assert order == list(range(m))


@settings(deadline=None)
@given(sizes(), st.randoms(use_true_random=False))
def test_receives_in_the_order_of_the_sends_always_end(size: tuple[str, int, int, int], draw: Any) -> None:
    """Ranks run in any interleaving, and each takes messages from each sender strictly in the order they were sent.

    Two receives posted ahead are enough: no rank needs a message while two earlier ones of its sender wait unused.
    """
    schedule, p, v, _ = size
    lists = rank_operations(*size)
    listed = transfers(*size)
    sent: dict[tuple[int, int], int] = dict.fromkeys(listed, 0)
    received: dict[tuple[int, int], int] = dict.fromkeys(listed, 0)
    unused: dict[tuple[int, int], int] = dict.fromkeys(listed, 0)
    ready: list[set[tuple[bool, int, int]]] = [set() for _ in range(p)]  # (is forward, stage, micro-batch) at a rank
    done: set[Operation] = set()
    cursor = [0] * p

    def is_run(rank: int) -> bool:
        """Run the rank's next operation if its input is there, or can be received."""
        operation = lists[rank][cursor[rank]]
        stage, i, is_forward = operation.stage, operation.micro_batch, operation.kind is Kind.FORWARD
        if operation.kind is Kind.WEIGHT_GRAD:
            assert Operation(Kind.INPUT_GRAD, stage, i) in done
        elif not is_forward:
            assert Operation(Kind.FORWARD, stage, i) in done
        source = stage - 1 if is_forward else stage + 1
        if operation.kind is not Kind.WEIGHT_GRAD and 0 <= source < p * v:
            pair = (rank_of_stage(schedule, source, p), rank)
            key = (is_forward, stage, i)
            while key not in ready[rank]:
                if pair[0] == rank or received[pair] == sent[pair]:
                    assert pair[0] != rank, "what a rank hands to itself must come before"
                    return False
                message = listed[pair][received[pair]]
                received[pair] += 1
                ready[rank].add((message.is_forward, message.stage, message.micro_batch))
                unused[pair] += 1
                assert unused[pair] <= 2
            ready[rank].remove(key)
            if pair in unused:
                unused[pair] -= 1
        done.add(operation)
        target = receiving_stage(operation, p * v)
        if target is not None:
            receiver = rank_of_stage(schedule, target, p)
            if receiver == rank:
                ready[rank].add((is_forward, target, i))
            else:
                index = sent[rank, receiver]
                assert listed[rank, receiver][index] == Transfer(operation, target)
                assert received_by(*size)[rank, receiver][index] == received.get((receiver, rank), 0)
                sent[rank, receiver] += 1
        cursor[rank] += 1
        return True

    running = set(range(p))
    stuck: set[int] = set()
    while running:
        assert stuck != running, f"deadlock of ranks {stuck}"
        rank = draw.choice(sorted(running - stuck))
        if not is_run(rank):
            stuck.add(rank)
            continue
        stuck.clear()
        if cursor[rank] == len(lists[rank]):
            running.remove(rank)
    assert received == sent == {pair: len(made) for pair, made in listed.items()}
    assert not any(ready)


def in_flight(operations: tuple[Operation, ...], until: Kind) -> dict[int, int]:
    """Return how many micro-batches each stage of a rank holds at most, by stage, from their forward to ``until``."""
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    for operation in operations:
        stage = operation.stage
        if operation.kind is Kind.FORWARD:
            held[stage] = held.get(stage, 0) + 1
            most[stage] = max(most.get(stage, 0), held[stage])
        elif operation.kind in (Kind.BACKWARD, until):
            held[stage] -= 1
    return most


@pytest.mark.parametrize("m", [1, 3, 8, 21])
def test_most_in_flight(m: int) -> None:
    def held(schedule: str, until: Kind = Kind.INPUT_GRAD) -> list[float]:
        v = chunks_of(schedule)
        return [sum(in_flight(rank, until=until).values()) / v for rank in rank_operations(schedule, 4, v, m)]

    warm = [min(m, 4 - rank) for rank in range(4)]
    assert held("gpipe") == [m] * 4
    assert held("1f1b") == held("zb-h1") == warm
    # Whatever rank 0 of 1F1B holds of activations, the others may hold with the inputs of missing weight gradients.
    for schedule in ("zb-h1", "zbv"):
        for rank in most_held(schedule, 4, chunks_of(schedule), m):
            most = max(sum(active + waiting for active, waiting in moment) for moment in rank) / chunks_of(schedule)
            assert most <= min(m, 4)
            assert most == 4 or m < 8


def test_most_in_flight_of_interleaved() -> None:
    def whole_stages(v: int, m: int) -> list[float]:
        return [max(sum(a for a, _ in moment) for moment in rank) / v for rank in most_held("interleaved", 4, v, m)]

    assert whole_stages(2, 8) == whole_stages(2, 40) == [5.5, 4.5, 3.5, 2.5]
    assert whole_stages(3, 8) == pytest.approx([5, 13 / 3, 11 / 3, 3])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("dualpipe", 4, 1, 8), "schedule='dualpipe' must be one of 'gpipe', '1f1b', 'interleaved', 'zb-h1', 'zbv'"),
        (("interleaved", 4, 2, 6), "6 micro-batches are not a multiple of 4: .* a step has 4 or 8 micro-batches"),
        (("interleaved", 4, 2, 3), "3 micro-batches are not a multiple of 4: .* a step has 4 micro-batches"),
        (("interleaved", 4, 1, 8), "at least 2 stages on each rank, but chunks=1: pass chunks=2, or schedule='1f1b'"),
        (("1f1b", 4, 2, 8), "schedule='1f1b' has 1 stage on each rank, but chunks=2: .*schedule='interleaved'"),
        (("zbv", 4, 3, 8), "schedule='zbv' has 2 stages on each rank, but chunks=3: pass chunks=2"),
        (("zbv", 4, True, 8), "chunks=True must be a whole number"),
        (("1f1b", 0, 1, 8), "pp=0 must be at least 1"),
        (("1f1b", 4, 1, 0), "the number of micro-batches is 0, but must be at least 1"),
    ],
)
def test_sizes_without_a_schedule(sizes: tuple[str, int, int, int], message: str) -> None:
    for refuse in (check, rank_operations):
        with pytest.raises(ValueError, match=message):
            refuse(*sizes)


def test_planner_and_schedules_need_no_torch() -> None:
    program = """
import sys
sys.modules["torch"] = None
import meshwright.plan.partition, meshwright.plan.schedule
import meshwright_plan.answers.explain, meshwright_tools.plan_page.page, meshwright_plan.search.search
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
