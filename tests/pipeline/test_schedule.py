"""The schedules are torch's, legal, and free of deadlocks."""

from __future__ import annotations

from unittest import mock

import pytest
from torch.distributed.pipelining import PipelineStage, schedules

from meshwright.pipeline.schedule import Kind, Operation, rank_operations

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
