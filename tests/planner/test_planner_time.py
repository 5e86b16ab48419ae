"""The pipeline simulation against what is known in closed form, and a step's time against its laws."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from meshwright.planner import simulate
from meshwright.planner.candidate import Candidate, Job, stage_layers
from meshwright.planner.hardware import Cluster, Coefficients, device
from meshwright.planner.shapes import ModelShape
from meshwright.planner.simulate import pipeline_time, stage_order
from meshwright.planner.time import StepModel

SHAPE = ModelShape(
    name="8B", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256
)  # fmt: skip
JOB = Job(seq_len=4096, global_batch=64)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_even_pipeline_has_the_closed_bubble(stages: int, interleave: int) -> None:
    """Narayanan et al. 2021: a bubble of (p - 1) / (v m) of the work."""
    micro = 4 * stages
    total = pipeline_time([1.0] * stages, [2.0] * stages, micro, interleave=interleave)
    assert total == pytest.approx(3 * micro + 3 * (stages - 1) / interleave)


def test_long_schedules_are_extrapolated_exactly() -> None:
    draw = random.Random(0)
    for stages, interleave, micro in ((4, 1, 61), (8, 1, 130), (4, 2, 64), (8, 4, 120)):
        forward = [draw.uniform(0.8, 1.2) for _ in range(stages)]
        backward = [2 * value for value in forward]
        whole = simulate._simulate(tuple(forward), tuple(backward), micro, interleave, 0.03)
        short = pipeline_time(forward, backward, micro, interleave=interleave, transfer=0.03)
        assert short == pytest.approx(whole, rel=1e-12)


def test_slowest_stage_decides() -> None:
    even = pipeline_time([1.0] * 4, [2.0] * 4, 64)
    one_slow = pipeline_time([1.0, 1.0, 1.5, 1.0], [2.0, 2.0, 3.0, 2.0], 64)
    assert 1.45 < one_slow / even < 1.5


@pytest.mark.parametrize(("stages", "micro", "interleave"), [(4, 8, 1), (4, 8, 2), (3, 7, 2), (2, 1, 1)])
def test_every_stage_runs_each_piece_once(stages: int, micro: int, interleave: int) -> None:
    pieces = {(f, chunk, m) for f in (True, False) for chunk in range(interleave) for m in range(micro)}
    for stage in range(stages):
        order = stage_order(stage, stages, micro, interleave)
        assert len(order) == len(pieces) and set(order) == pieces


@pytest.mark.parametrize(
    ("layers", "stages", "counts"), [(8, 4, (2, 2, 2, 2)), (7, 4, (2, 2, 2, 1)), (6, 4, (1, 2, 2, 1))]
)
def test_layers_are_dealt_evenly_with_light_ends(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    assert stage_layers(layers, stages) == counts


def step(plan: Candidate, job: Job = JOB, *, gpus: int | None = None, **cluster: Any) -> Any:
    shape_cluster = Cluster(device=device("h100-sxm"), gpus=gpus or plan.world_size, **cluster)
    return StepModel(SHAPE, shape_cluster, Coefficients()).step(plan, job)


PLANS = [
    Candidate(shard=8, zero_stage=1, accumulation=8),
    Candidate(shard=4, tp=2, sequence_parallel=True, zero_stage=1, accumulation=16, recompute="full"),
    Candidate(replicate=2, pp=4, accumulation=32),
    Candidate(replicate=2, pp=4, interleave=2, accumulation=32, recompute="full", recomputed=3),
    Candidate(shard=8, zero_stage=3, accumulation=8, recompute="selective"),
    Candidate(replicate=2, shard=4, zero_stage=3, accumulation=8),
    Candidate(shard=4, cp=2, zero_stage=1, accumulation=16),
    Candidate(shard=4, cp=2, ring=False, zero_stage=2, accumulation=16),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.label)
def test_bound_is_below_the_simulated_time(plan: Candidate) -> None:
    model = StepModel(SHAPE, Cluster(device=device("h100-sxm"), gpus=8), Coefficients())
    assert 0.5 < model.bound(plan, JOB) / model.step(plan, JOB).total <= 1


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.label)
def test_parts_are_not_negative_and_add_up(plan: Candidate) -> None:
    model = StepModel(SHAPE, Cluster(device=device("h100-sxm"), gpus=8), Coefficients())
    time = model.step(plan, JOB)
    assert all(value >= 0 for value in time.parts.values()), time.parts
    forward, backward, _, _ = model.stages(plan, JOB)
    busy = plan.accumulation * max(f + b for f, b in zip(forward, backward, strict=True))
    computed = sum(
        getattr(time, name) for name in ("matmul", "attention", "elementwise", "recompute", "tensor", "context")
    )
    assert computed == pytest.approx(busy)


def test_laws() -> None:
    """What must hold whatever the coefficients are."""
    plain, job = PLANS[0], JOB
    assert step(plain).total < step(dataclasses.replace(plain, recompute="selective")).total
    assert (
        step(dataclasses.replace(plain, recompute="selective")).total
        < step(dataclasses.replace(plain, recompute="full")).total
    )
    assert step(plain, dataclasses.replace(job, precision="fp8")).total < step(plain).total
    assert step(plain, dataclasses.replace(job, fused_attention=False)).total > step(plain).total
    wide = dataclasses.replace(plain, shard=64, accumulation=1)
    assert step(wide, slow_link=10e9).total > step(wide, slow_link=50e9).total
    assert step(wide, slow_link=10e9).data > step(wide, slow_link=50e9).data > 0


def test_twice_the_devices_never_halve_the_time_entirely() -> None:
    """Strong scaling is below linear: communication, bubbles and stragglers grow."""
    eight = step(Candidate(shard=8, zero_stage=1, accumulation=8)).total
    sixteen = step(Candidate(shard=16, zero_stage=1, accumulation=4)).total
    assert 0.5 < sixteen / eight < 0.75
