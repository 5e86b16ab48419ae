"""What a step over stages costs, counted: the operations that run, messages, collectives, and the bytes held."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import meshwright as mw
from meshwright.pipeline.links import AHEAD
from meshwright.plan.schedule import SCHEDULES, most_held, rank_operations
from support.stage_memory import holding
from support.stage_messages import Messages, computed_messages
from support.staged_model import Sizes
from support.tiers import crossing, crossings

MICRO_BATCHES = 16  # far more than any rank holds, except under gpipe


def messages_of_a_step(schedule: str, sizes: Sizes) -> Messages:
    model, batch = sizes.distributed(schedule, dist.get_world_size()), sizes.batch()
    for step in range(2):  # the first also announces shapes and dtypes, but not those of gradients
        with Messages() as messages:
            model(**batch).loss.backward()
            mw.clip_grad_norm_(model, 1.0)
        if step == 0 and dist.get_rank() < dist.get_world_size() - 1:
            assert sum(messages.sent.values()) > sum(messages.bytes.values()) / sizes.message_bytes
    return messages


@pytest.mark.parametrize("p", [crossing(2), 4])
@pytest.mark.parametrize("schedule", crossings(SCHEDULES, but=["1f1b", "interleaved", "zbv"]))
def test_messages_of_a_step(schedule: str, p: int, request: pytest.FixtureRequest) -> None:
    sizes = Sizes(micro_batches=2 * p)
    found = request.getfixturevalue(f"pool{p}").run(messages_of_a_step, schedule, sizes)
    v = sizes.plan(schedule, p).stages_per_rank
    expected = computed_messages(schedule, p, v, sizes.micro_batches)
    assert sum((one.sent for one in found), start=type(expected)()) == expected
    sent_bytes = sum((one.bytes for one in found), start=type(expected)())
    assert sent_bytes == {pair: count * sizes.message_bytes for pair, count in expected.items()}
    # The loss goes to every rank, and whether a stage has failed; and the norm is of all stages.
    assert all(one.collectives == {"allreduce_": 1, "_allgather_base_": 1} for one in found)


def held_in_a_step(schedule: str, sizes: Sizes) -> Any:
    model, batch = sizes.distributed(schedule, dist.get_world_size()), sizes.batch()
    with holding(model, [batch]) as steps:
        for _ in range(2):  # the first makes what is kept from step to step, such as rotary tables
            model(**batch).loss.backward()
            model.zero_grad()
    return steps[-1]


@pytest.mark.parametrize("schedule", crossings(SCHEDULES, but=["1f1b", "zbv"]))
def test_bytes_that_a_rank_holds(schedule: str, pool4: Any) -> None:
    sizes = Sizes(micro_batches=MICRO_BATCHES)
    v = sizes.plan(schedule, 4).stages_per_rank
    operations = rank_operations(schedule, 4, v, MICRO_BATCHES)
    for rank, held in enumerate(pool4.run(held_in_a_step, schedule, sizes)):
        assert tuple(held.operations) == operations[rank]
        counted = held.counted()
        stage_bytes = counted[0]
        assert stage_bytes > 20 * sizes.message_bytes
        # Tensors that were sent are kept until an answer shows that they have arrived. At the fullest moment these are
        # no more than a rank receives ahead from two neighbours. All of a step would be 12 to 50.
        assert abs(max(held.after) - max(counted)) <= 2 * AHEAD * sizes.message_bytes
        if v == 1:
            most = max(active for ((active, _),) in most_held(schedule, 4, v, MICRO_BATCHES)[rank])
            # The sums of losses and of counts, of 8 bytes, are held once, and are in the first micro-batch's bytes.
            assert most * (stage_bytes - 16) <= max(held.after)
