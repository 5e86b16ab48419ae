"""Memory by part against the formulas it comes from."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.published_runs.other_runtimes import OtherJob, other_peak
from meshwright_plan.expected_traffic import step_traffic
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.hardware import Cluster, Coefficients, device
from meshwright_plan.memory.activations import SavedByLayer, saved_activations
from meshwright_plan.memory.peak import (
    held_activations,
    least_memory,
    peak_memory,
    pending_weight_grads,
    stage_memory,
    state_memory,
)
from meshwright_plan.search.space import Space
from meshwright_plan.time.step import StepModel
from support.shapes import changed, in_runs

pytestmark = pytest.mark.quick

SEVEN = ModelShape.of(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=32000)
EIGHT = changed(SEVEN, name="8B", kv_heads=8, ffn=14336, vocab=128256)
JOB = Job(seq_len=2048, global_batch=8)


def saved(shape: ModelShape, plan: Candidate) -> SavedByLayer:
    """Return what a layer of a model of equal layers saves."""
    return saved_activations(shape, plan, JOB).runs[0]


@pytest.mark.parametrize(("shape", "expected"), [(SEVEN, 45.53), (EIGHT, 49.03)])
def test_saved_activations_are_those_that_were_traced(shape: ModelShape, expected: float) -> None:
    """Bytes for each position and channel, traced on transformers 5.23 with the fused attention kernel."""
    assert saved(shape, Candidate()).layer / (2048 * 4096) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_by_zero_stage(stage: int) -> None:
    """Rajbhandari et al. 2020, Table 1: 16 bytes a parameter, divided part by part."""
    plan = Candidate(dp=8, zero_stage=stage)
    memory = other_peak(SEVEN, plan, OtherJob(seq_len=2048, global_batch=8))
    elements = SEVEN.parameters
    assert memory.weights == 2 * elements / (8 if stage == 3 else 1)
    assert memory.gradients == 2 * elements / (8 if stage >= 2 else 1)
    assert memory.optimizer == 12 * elements / (8 if stage >= 1 else 1)
    assert (memory.unsharded > 0) is (stage == 3)


def test_all_stages_together_hold_every_parameter_once() -> None:
    plan = Candidate(pp=4, gradient_accumulation_steps=8)
    held = sum(stage_memory(SEVEN, plan, JOB, stage).weights for stage in range(4)) / 2
    assert held == pytest.approx(SEVEN.parameters, rel=1e-5)


@pytest.mark.parametrize(("job", "tied"), [
    (JOB, True),
    (JOB, False),
    (JOB.in_32_bits(), True),
    (dataclasses.replace(JOB, on_cpu=True).in_32_bits(), False),
])  # fmt: skip
def test_every_plan_holds_the_weights_and_the_state_once(job: Job, tied: bool) -> None:
    """So a plan that fits is never missed, if the devices together have less memory than that."""
    shape = changed(EIGHT, tied=tied)
    space = Space(shape=shape, cluster=Cluster(device=device("h100-sxm"), gpus=4), job=job, allow_future=True)
    held = [
        4 * peak_memory(shape, space.candidate(region, micro, zero, recompute), job).total / state_memory(shape, job)
        for region in space.regions()
        for micro in space.micro_batches(region)
        for zero in space.zero(region)
        for recompute in space.recompute(region)
    ]
    assert len(held) > 100 and 1 < min(held) < 4


@pytest.mark.parametrize(
    ("schedule", "chunks", "held"),
    [
        ("gpipe", 1, (8, 8, 8, 8)),
        ("1f1b", 1, (4, 3, 2, 1)),
        ("interleaved", 2, (5.5, 4.5, 3.5, 2.5)),  # Korthikanti et al. 2022: p (1 + (p - 1) / (p v)) on the first
    ],
)
def test_activations_in_flight(schedule: str, chunks: int, held: tuple[float, ...]) -> None:
    plan = Candidate(pp=4, schedule=schedule, chunks=chunks, gradient_accumulation_steps=8)
    micro_batch = 8 * saved(SEVEN, plan).layer
    assert [held_activations(SEVEN, plan, JOB, rank) / micro_batch for rank in range(4)] == pytest.approx(held)


@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("zbv", 2)])
def test_zero_bubble_holds_no_more_than_the_first_stage_of_1f1b(schedule: str, chunks: int) -> None:
    """What waits for its weight gradients is less than the activations that the first stage holds instead."""
    plan = Candidate(pp=4, schedule=schedule, chunks=chunks, gradient_accumulation_steps=8)
    whole = 8 * saved(SEVEN, plan).layer
    queue = 8 * pending_weight_grads(SEVEN.runs[0], plan, JOB)
    assert 0.5 * whole < queue < whole
    held = [held_activations(SEVEN, plan, JOB, rank) for rank in range(4)]
    if schedule == "zb-h1":
        assert held == pytest.approx([(4 - rank) * whole + rank * queue for rank in range(4)])
    assert max(held) == held[0] == pytest.approx(4 * whole)
    long = Candidate(pp=4, schedule=schedule, chunks=chunks, gradient_accumulation_steps=64)
    assert [held_activations(SEVEN, long, JOB, rank) for rank in range(4)] == pytest.approx(held)


def test_sequence_parallel_divides_all_of_a_layer() -> None:
    one = saved(SEVEN, Candidate()).layer
    tensor = saved(SEVEN, Candidate(tp=4)).layer
    both = saved(SEVEN, Candidate(tp=4, sequence_parallel=True)).layer
    assert both == pytest.approx(one / 4)
    assert both < tensor < one


def test_recompute_keeps_a_layers_input() -> None:
    assert saved(SEVEN, Candidate()).kept == 2 * 2048 * 4096
    plans = [Candidate(recompute="full", recomputed_layers=count) for count in (8, 16, 24)]
    plans = [Candidate(), *plans, Candidate(recompute="full")]
    totals = [peak_memory(SEVEN, plan, Job(seq_len=8192, global_batch=1)).total for plan in plans]
    assert totals == sorted(totals, reverse=True)


PLANS = [
    Candidate(),
    Candidate(recompute="full"),
    Candidate(dp=8, zero_stage=3, micro_batch_size=2),
    Candidate(tp=4, sequence_parallel=True, cp=2, context="ring", recompute="full", recomputed_layers=5),
    Candidate(pp=4, gradient_accumulation_steps=8),
    Candidate(pp=5, gradient_accumulation_steps=8, stages=(7, 7, 7, 7, 4), recompute="full"),
    Candidate(pp=3, schedule="zb-h1", gradient_accumulation_steps=2),
    Candidate(pp=4, schedule="zbv", chunks=2, stages=(5, 4, 4, 4, 4, 4, 4, 3), gradient_accumulation_steps=8),
    Candidate(pp=4, schedule="interleaved", chunks=4, gradient_accumulation_steps=8, recompute="selective"),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.label)
def test_the_least_memory_is_below_the_estimate(plan: Candidate) -> None:
    """The search leaves out what the bound excludes; a bound of nothing would exclude nothing."""
    for seq_len in (2048, 262144):
        job = dataclasses.replace(JOB, seq_len=seq_len)
        ratio = least_memory(EIGHT, plan, job) / peak_memory(EIGHT, plan, job).total
        assert ratio <= 1
    assert ratio > 0.01  # the rest of a long sequence is in other virtual stages, in flight, or a block of scores


def test_parts_add_up() -> None:
    for plan in (Candidate(), Candidate(dp=8, zero_stage=3), Candidate(tp=8, recompute="full")):
        memory = peak_memory(EIGHT, plan, JOB)
        assert memory.total == pytest.approx(sum(memory.parts.values()))
        assert all(value >= 0 for value in memory.parts.values())


PLANS = (
    Candidate(micro_batch_size=8),
    Candidate(dp=4, zero_stage=3, gradient_accumulation_steps=2),
    Candidate(tp=2, sequence_parallel=True, recompute="full", recomputed_layers=7, micro_batch_size=8),
    Candidate(cp=4, context="ring", dp=2, micro_batch_size=4),
    Candidate(pp=2, gradient_accumulation_steps=8, recompute="full", recomputed_layers=3),
    Candidate(pp=4, schedule="zbv", chunks=2, gradient_accumulation_steps=8),
    Candidate(pp=4, stages=(9, 9, 8, 6), gradient_accumulation_steps=8, dp=2, zero_stage=1),
)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.label)
def test_equal_layers_in_several_runs_cost_as_much_as_in_one(plan: Candidate) -> None:
    job = dataclasses.replace(JOB, global_batch=plan.global_batch)
    one, several = EIGHT, in_runs(EIGHT, 5, 20, 7)

    def estimates(shape: ModelShape) -> list[float]:
        model = StepModel(shape, Cluster(device=device("h100-sxm"), gpus=8), Coefficients())
        traffic = step_traffic(shape, plan, job) if plan.pp == 1 else {}
        sent = [axis.bytes for phase in traffic.values() for axis in phase.values()]
        memory = [stage_memory(shape, plan, job, stage).total for stage in range(plan.pp)]
        times = [model.step(plan, job).total, model.bound(plan, job), model.layer(plan, job).forward]
        return [shape.parameters, shape.flops(2048), least_memory(shape, plan, job), *memory, *times, *sent]

    assert estimates(several) == pytest.approx(estimates(one), rel=1e-9)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.label)
def test_layers_of_another_kind_cost_something_between(plan: Candidate) -> None:
    job = dataclasses.replace(JOB, global_batch=plan.global_batch)
    wide = changed(EIGHT, ffn=2 * 14336)
    mixed = dataclasses.replace(EIGHT, runs=(in_runs(EIGHT, 16).runs[0], in_runs(wide, 16).runs[0]))
    cluster = Cluster(device=device("h100-sxm"), gpus=8)
    costs = []
    for shape in (EIGHT, mixed, wide):
        time = StepModel(shape, cluster, Coefficients()).step(plan, job).total
        costs.append((shape.parameters, shape.flops(2048), peak_memory(shape, plan, job).total, time))
        assert least_memory(shape, plan, job) < costs[-1][2]
    assert all(low < between <= high for low, between, high in zip(*costs, strict=True))
    if plan.pp == 2:  # the wide layers are on the second rank, beside the head
        first, second = (stage_memory(mixed, plan, job, stage).weights for stage in range(2))
        assert second / first > 1.2 * (
            stage_memory(EIGHT, plan, job, 1).weights / stage_memory(EIGHT, plan, job, 0).weights
        )
