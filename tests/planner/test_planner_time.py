"""The pipeline simulation against what is known in closed form, and a step's time against its laws."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from benchmarks.published_runs.other_runtimes import OtherJob, OtherModel, other_peak
from meshwright.errors import PlanError
from meshwright.plan.schedule import stages_of_rank
from meshwright_plan.expected_traffic import step_traffic
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.hardware import Cluster, Coefficients, device
from meshwright_plan.search.space import Space
from meshwright_plan.time import simulate
from meshwright_plan.time.simulate import SimulatedPipeline, pipeline_time
from meshwright_plan.time.step import StepModel
from support.shapes import changed

pytestmark = pytest.mark.quick

SHAPE = ModelShape.of(
    name="8B", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256
)  # fmt: skip
JOB = Job(seq_len=4096, global_batch=64)


def even(schedule: str, ranks: int, chunks: int = 1, slow: Mapping[int, float] | None = None) -> SimulatedPipeline:
    """F, I and W take one second on each rank, or ``slow`` times that on some virtual stages."""
    seconds = tuple((slow or {}).get(stage, 1.0) / chunks for stage in range(ranks * chunks))
    return SimulatedPipeline(schedule=schedule, ranks=ranks, forward=seconds, input_grad=seconds, weight_grad=seconds)


BUBBLES = [
    ("gpipe", 1, lambda p, m: (p - 1) / (m + p - 1), (0.273, 0.158, 0.304)),
    ("1f1b", 1, lambda p, m: (p - 1) / (m + p - 1), (0.273, 0.158, 0.304)),
    ("interleaved", 2, lambda p, m: (p - 1) / (2 * m + p - 1), (0.158, 0.086, 0.179)),
    ("interleaved", 4, lambda p, m: (p - 1) / (4 * m + p - 1), (0.086, 0.045, 0.099)),
    ("zb-h1", 1, lambda p, m: (p - 1) / (3 * m + p - 1), (0.111, 0.059, 0.127)),
    ("zbv", 2, lambda p, m: (p - 1) / (6 * m + p - 1), (0.059, 0.030, 0.068)),
]


@pytest.mark.parametrize(("schedule", "chunks", "formula", "known"), BUBBLES, ids=lambda value: str(value)[:11])
def test_bubbles(schedule: str, chunks: int, formula: Callable[[int, int], float], known: tuple[float, ...]) -> None:
    """Narayanan et al. 2021 and Qi et al. 2024; the figures are for p, m of 4, 8 then 4, 16 then 8, 16."""
    cases = [(2, 8), (3, 9), *FIGURES, (8, 32)]
    bubbles = {(p, m): 1 - 3 * m / pipeline_time(even(schedule, p, chunks), m) for p, m in cases}
    assert bubbles == pytest.approx({(p, m): formula(p, m) for p, m in cases})
    assert [bubbles[case] for case in FIGURES] == pytest.approx(known, abs=5.1e-4)


FIGURES = [(4, 8), (4, 16), (8, 16)]


@pytest.mark.parametrize(("schedule", "chunks", "micro"), [
    ("gpipe", 1, 130), ("1f1b", 1, 61), ("1f1b", 1, 130), ("interleaved", 2, 128), ("interleaved", 4, 120),
    ("zb-h1", 1, 130), ("zbv", 2, 130),
])  # fmt: skip
@pytest.mark.parametrize("ranks", [4, 8])
def test_long_schedules_are_extrapolated_exactly(schedule: str, chunks: int, micro: int, ranks: int) -> None:
    pipeline = dataclasses.replace(even(schedule, ranks, chunks, slow={ranks * chunks - 1: 1.3}), transfer=0.03)
    assert pipeline_time(pipeline, micro) == pytest.approx(max(simulate._ends(pipeline, micro)), rel=1e-12)


def test_slowest_stage_decides() -> None:
    one_slow = pipeline_time(even("1f1b", 4, slow={2: 1.5}), 64)
    assert 1.45 < one_slow / pipeline_time(even("1f1b", 4), 64) < 1.5


def test_what_stays_on_a_rank_takes_no_transfer() -> None:
    """A single micro-batch on the V of two ranks crosses the network twice on its way and twice back."""
    plain = pipeline_time(even("zbv", 2, 2), 1)
    assert pipeline_time(dataclasses.replace(even("zbv", 2, 2), transfer=1.0), 1) == pytest.approx(plain + 4)


def test_uneven_stages_relieve_the_rank_with_the_head() -> None:
    """A vocabulary of 128 thousand words weighs as much as several layers of 4096 channels."""
    model = StepModel(SHAPE, Cluster(device=device("h100-sxm"), gpus=8), Coefficients())
    plan = Candidate(dp=2, pp=4, gradient_accumulation_steps=32)
    better = model.balanced(plan, JOB)
    assert better is not None and better.stages is not None
    assert sum(better.stages) == SHAPE.layers and better.stages[-1] < 8
    assert model.step(better, JOB).total < model.step(plan, JOB).total
    assert model.balanced(better, JOB) == better
    small = StepModel(dataclasses.replace(SHAPE, vocab=512), model.cluster, Coefficients())
    assert small.balanced(plan, JOB) is None


def step(plan: Candidate, job: Job = JOB, *, gpus: int | None = None, **cluster: Any) -> Any:
    shape_cluster = Cluster(device=device("h100-sxm"), gpus=gpus or plan.world_size, **cluster)
    return StepModel(SHAPE, shape_cluster, Coefficients()).step(plan, job)


PLANS = [
    Candidate(dp=8, zero_stage=1, gradient_accumulation_steps=8),
    Candidate(dp=4, tp=2, sequence_parallel=True, zero_stage=1, gradient_accumulation_steps=16, recompute="full"),
    Candidate(dp=2, pp=4, gradient_accumulation_steps=32),
    Candidate(
        dp=2,
        pp=4,
        schedule="interleaved",
        chunks=2,
        gradient_accumulation_steps=32,
        recompute="full",
        recomputed_layers=3,
    ),
    Candidate(tp=2, sequence_parallel=True, pp=4, schedule="zb-h1", gradient_accumulation_steps=64),
    Candidate(dp=2, pp=4, schedule="zbv", chunks=2, stages=(4, 4, 4, 4, 4, 4, 5, 3), gradient_accumulation_steps=32),
    Candidate(dp=8, zero_stage=3, gradient_accumulation_steps=8, recompute="selective"),
    Candidate(dp=8, replicate=2, zero_stage=3, gradient_accumulation_steps=8),
    Candidate(dp=4, cp=2, zero_stage=1, gradient_accumulation_steps=16),
    Candidate(dp=4, cp=2, context="ring", zero_stage=3, gradient_accumulation_steps=16),
    Candidate(dp=2, cp=4, context="hybrid", ulysses=2, gradient_accumulation_steps=32),
    Candidate(dp=4, cp=2, context="ulysses", zero_stage=2, gradient_accumulation_steps=16),
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
    forward, backward = model.stages(plan, JOB)
    held = (stages_of_rank(plan.schedule, rank, plan.pp, plan.stages_per_rank) for rank in range(plan.pp))
    busy = plan.gradient_accumulation_steps * max(
        sum(forward[stage] + backward[stage] for stage in stages) for stages in held
    )
    computed = sum(
        getattr(time, name) for name in ("matmul", "attention", "elementwise", "recompute", "tensor", "context")
    )
    assert computed == pytest.approx(busy)


def test_laws() -> None:
    """What must hold whatever the coefficients are."""
    plain = PLANS[0]
    assert step(plain).total < step(dataclasses.replace(plain, recompute="selective")).total
    kinds = [dataclasses.replace(plain, recompute=kind) for kind in ("none", "selective", "per-op", "full")]
    other = OtherModel(SHAPE, Cluster(device=device("h100-sxm"), gpus=8), Coefficients())
    job = OtherJob(seq_len=JOB.seq_len, global_batch=JOB.global_batch)
    again = [other.step(plan, job).total for plan in kinds]
    assert again == sorted(again)
    whole = other.step(kinds[-1], dataclasses.replace(job, whole_recompute=True)).total
    assert whole > 1.02 * again[-1]
    assert other.step(plain, dataclasses.replace(job, fused_attention=False)).total > again[0]
    kept = [other_peak(SHAPE, plan, job).total for plan in (kinds[3], kinds[2], kinds[0])]
    assert kept == sorted(kept) and len(set(kept)) == 3
    assert step(plain, dataclasses.replace(JOB, precision="fp8")).total < step(plain).total
    wide = plain.copy(dp=64, gradient_accumulation_steps=1)
    assert step(wide, slow_link=10e9).total > step(wide, slow_link=50e9).total
    assert step(wide, slow_link=10e9).data > step(wide, slow_link=50e9).data > 0


def test_precisions() -> None:
    gb200 = StepModel(SHAPE, Cluster(device=device("gb200"), gpus=8), Coefficients())
    seconds = [gb200.step(PLANS[0], dataclasses.replace(JOB, precision=p)).total for p in ("bf16", "fp8", "fp4")]
    assert seconds == sorted(seconds, reverse=True)
    for lacking, precision in (("h100-sxm", "fp4"), ("a100-80", "fp8")):
        job = dataclasses.replace(JOB, precision=precision)
        with pytest.raises(PlanError, match=f"{lacking} has none: write --precision bf16"):
            Space(shape=SHAPE, cluster=Cluster(device=device(lacking), gpus=8), job=job)


def test_this_runtime_computes_the_gradients_of_the_head_in_forward() -> None:
    """The same three products; none of the weight's gradient can be put off."""
    model = StepModel(SHAPE, Cluster(device=device("h100-sxm"), gpus=8), Coefficients())
    whole = model.head(PLANS[0], dataclasses.replace(JOB, logits="gathered"))
    chunked = model.head(PLANS[0], JOB)
    assert chunked.backward == chunked.weight_grad == 0 < whole.weight_grad
    assert chunked.forward == pytest.approx(whole.forward + whole.backward)
    assert chunked.matmul == whole.matmul


def test_a_group_of_ranks_that_share_one_state_gathers_the_weights_inside_the_node() -> None:
    """What crosses the nodes is the sum of the gradients of the groups."""
    plan = Candidate(dp=64, zero_stage=1, gradient_accumulation_steps=1)
    grouped = plan.copy(replicate=8)
    cluster = Cluster(device=device("h100-sxm"), gpus=64, slow_link=6.25e9)
    model = StepModel(SHAPE, cluster, Coefficients())
    (_, gather), (_, near, across) = (model.overlaps(p, JOB, 1.0, 1.0) for p in (plan, grouped))
    assert near.seconds < gather.seconds / 5 and across.seconds > near.seconds


@pytest.mark.parametrize("reduced", [None, "bfloat16"])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_time_counts_the_bytes_that_the_runtime_sends(zero_stage: int, element_bytes: int, reduced: Any) -> None:
    """``step_traffic`` equals the trace. 1e-3 is for counts of tokens and flags, padding, and norms, whole under tp."""
    ranks, micro = 4, 2
    plan = Candidate(dp=ranks, tp=2, zero_stage=zero_stage, gradient_accumulation_steps=micro, reduce_dtype=reduced)
    job = Job(seq_len=64, global_batch=ranks * micro)
    job = job.in_32_bits() if element_bytes == 4 else job
    cluster = Cluster(device=device("h100-sxm"), gpus=8)
    bandwidth_alone = Coefficients(latency=1e-30, fast_link=1.0)
    for tied in (False, True):
        shape = dataclasses.replace(SHAPE, tied=tied)
        overlaps = StepModel(shape, cluster, bandwidth_alone).overlaps(plan, job, 0.0, 0.0)
        seconds = sum(one.seconds * (micro if one.is_repeated else 1) for one in overlaps)
        sent = 0.0
        for axes in step_traffic(shape, plan, job).values():
            sent += axes["dp"].bytes * (2 if axes["dp"].counts["all-reduce"] > 1 else 1)  # an all-reduce goes twice
        assert seconds * cluster.fast * ranks / (ranks - 1) == pytest.approx(sent, rel=1e-3)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("norms", [2, 4])
def test_recompute_sends_over_tp_what_the_runtime_sends(norms: int, sequence_parallel: bool) -> None:
    """Two depths differ by whole layers. 2e-3 is for the gradients of norms, which no layer of the time counts."""
    plan = Candidate(tp=4, sequence_parallel=sequence_parallel, recompute="full")
    job, rate = Job(seq_len=4096, global_batch=1), 1e-3  # nothing but links is slow

    def shape(layers: int) -> ModelShape:
        return changed(SHAPE, layers=layers, traits=dataclasses.replace(SHAPE.traits, norms=norms))

    def backward(share: float) -> float:
        cluster = Cluster(device=device("h100-sxm"), gpus=4, fast_link=rate)
        k = Coefficients(fast_link=share, latency=1e-30, launch=1e-12)
        return StepModel(shape(2), cluster, k).layer(plan, job).backward

    few, many = (step_traffic(shape(layers), plan, job)["backward"]["tp"] for layers in (2, 4))
    sent = (many.bytes - few.bytes) / 2 * (1 if sequence_parallel else 2)  # an all-reduce goes twice
    assert (backward(0.5) - backward(1.0)) * rate * 4 / 3 == pytest.approx(sent, rel=2e-3)


def test_twice_the_devices_never_halve_the_time_entirely() -> None:
    """Strong scaling is below linear: communication, bubbles and stragglers grow."""
    eight = step(Candidate(dp=8, zero_stage=1, gradient_accumulation_steps=8)).total
    sixteen = step(Candidate(dp=16, zero_stage=1, gradient_accumulation_steps=4)).total
    assert 0.5 < sixteen / eight < 0.75


WIDE = ModelShape.of(name="m", layers=4, hidden=13824, heads=96, kv_heads=96, head_dim=144, ffn=55296, vocab=50304)


def _model(shape: ModelShape = WIDE, *, gpus: int = 64) -> StepModel:
    return OtherModel(shape, Cluster(device=device("a100-80"), gpus=gpus), Coefficients())


def test_a_ring_pays_each_neighbour_inside_a_node_and_each_doubling_between_nodes() -> None:
    hop = _model().ring(0.0, 2, 1)
    assert hop == Coefficients().latency
    assert _model().ring(0.0, 8, 1) == pytest.approx(7 * hop)
    assert _model().ring(0.0, 64, 1) == pytest.approx((7 + 3 * 5) * hop)
    assert _model().ring(0.0, 8, 8) == pytest.approx(3 * 5 * hop)


def test_heads_of_no_multiple_of_eight_are_slow_without_a_fused_kernel() -> None:
    """BigScience's chronicles: 128 heads of 108 take a quarter longer than 96 heads of 144, of the same work."""
    odd = changed(WIDE, heads=128, kv_heads=128, head_dim=108)
    plan = Candidate(tp=8, micro_batch_size=4)
    for fused, slower in ((False, 1.15), (True, 0.99)):
        job = OtherJob(seq_len=2048, global_batch=4, fused_attention=fused)
        even_time, odd_time = (_model(shape, gpus=8).step(plan, job).total for shape in (WIDE, odd))
        assert slower < odd_time / even_time < slower + 0.25
