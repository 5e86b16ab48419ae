"""What a run costs, which cluster is the smallest, and what plans of the user's own take."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from meshwright.errors import PlanError
from meshwright.plan.parallel_plan import ParallelPlan
from meshwright.plan.text import parse_plan
from meshwright_plan.answers import explain
from meshwright_plan.answers.cost import Budget, bill, bill_line, parse_tokens
from meshwright_plan.answers.notes import batch_warning, notes, without_repetitions
from meshwright_plan.answers.sweep import is_met, row_of, smallest_cluster, sweep_text
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.hardware import Cluster, device
from meshwright_plan.search.search import search, weigh
from meshwright_plan.search.space import Space
from meshwright_tools.cli.plan_settings import Settings, numbers

EIGHT = ModelShape.of(name="8B", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256)
JOB = Job(seq_len=4096, global_batch=64)


def space(gpus: int = 8, job: Job = JOB, **more: Any) -> Space:
    return Space(shape=EIGHT, cluster=Cluster(device=device("h100"), gpus=gpus), job=job, **more)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1T", 10**12),
        ("1.5t", 1_500_000_000_000),
        ("300B", 3 * 10**11),
        ("2_000", 2000),
        ("20m", 2 * 10**7),
        ("1e9", 10**9),
    ],
)
def test_tokens_with_a_unit(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "T", "-1B", "0", "0.5", "1 Q", "nan", "1e400"])
def test_tokens_that_are_no_number(text: str) -> None:
    with pytest.raises(PlanError, match="must be a number of tokens above zero"):
        parse_tokens(text)


def test_a_bill_by_hand() -> None:
    """1,001 tokens are 11 steps of 100; 11 steps of an hour on 3 devices are 33 hours."""
    made = bill(Budget(tokens=1001, price=2.0), gpus=3, step_tokens=100, step_seconds=3600.0, band=1.0)
    assert (made.steps, made.gpu_hours, made.cost, made.days) == (11, 33.0, 66.0, 11 / 24)
    assert "33 GPU-hours, 66 at 2 per GPU-hour (33 to 132)" in bill_line(made)
    with pytest.raises(PlanError, match="--price=0 must be"):
        Budget(tokens=1, price=0)


@pytest.mark.parametrize(("sequences", "warned"), [(4096, False), (4097, True), (65536, True)])
def test_batches_beyond_published_runs(sequences: int, warned: bool) -> None:
    warning = batch_warning(dataclasses.replace(JOB, global_batch=sequences))
    assert (warning is not None) == warned and (not warned or "--global-batch 4096" in str(warning))


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [("0", int, "'0' must be a positive integer"), ("8,x", int, "'x' must be"), ("8,8", int, "gives a value twice"),
     ("8k", int, "a positive integer; write --gpus 8192"),
     ("-1", float, "a number above zero"), ("", int, "'' must be"), ("1.5", int, "'1.5' must be")],
)  # fmt: skip
def test_options_with_several_values(text: str, kind: Any, message: str) -> None:
    assert numbers("--gpus", "64, 128", int) == (64, 128) and numbers("--gpus", None, int) == ()
    with pytest.raises(PlanError, match=message):
        numbers("--gpus", text, kind)
    one = Settings(gpu=(), precision=("bf16",), gpus=(1,), seq_len=(1,), global_batch=(1,), interconnect=())
    assert one.is_of_page and dataclasses.replace(one, gpu=("a", "b"), precision=("bf16", "fp8")).is_of_page
    assert not dataclasses.replace(one, gpus=(1, 2)).is_of_page
    with pytest.raises(PlanError, match="4 GPU types x 2 precisions are 8 answers, and a page has at most 6"):
        _ = dataclasses.replace(one, gpu=("a", "b", "c", "d"), precision=("bf16", "fp8")).is_of_page
    assert one.swept is None and dataclasses.replace(one, gpus=(1, 2)).swept == "gpus"
    with pytest.raises(PlanError, match="--gpus and --seq-len have several values"):
        _ = dataclasses.replace(one, gpus=(1, 2), seq_len=(1, 2)).swept


@pytest.mark.parametrize(
    ("words", "label"),
    [
        ("dp8 zero1", "dp8 zero1 mb8x1"),
        ("dp4 tp2+sp zero1 mb2", "dp4 tp2+sp zero1 mb2x8"),
        ("dp8 zero3 ga4", "dp8 zero3 mb2x4"),
        ("dp2 pp4 mb1", "dp2 pp4 zero0 mb1x32"),
        ("dp2 pp4x2 mb1", "dp2 pp4x2 zero0 mb1x32"),
        ("dp4 pp2(zbv) stages=9x2-8-6 zero1 mb1", "dp4 pp2(zbv) stages=9x2-8-6 zero1 mb1x16"),
        ("dp2 cp4(hybrid-2) zero1", "dp2 cp4(hybrid-2) zero1 mb32x1"),
        ("dp8 zero1 mb1 recompute=full(3)", "dp8 zero1 mb1x8 recompute=full(3)"),
    ],
)
def test_words_are_the_plan_that_is_weighed(words: str, label: str) -> None:
    assert Candidate.of(ParallelPlan(**parse_plan(words)), JOB).label == label


def test_each_plan_of_a_search_is_weighed_alike_by_its_words() -> None:
    """Time and memory are bitwise those of the search, for tp, cp, pp, ZeRO and recompute."""
    found = search(space(16), top=40)
    assert {choice.plan.pp > 1 for choice in found.choices} == {True, False}
    given = [Candidate.of(choice.plan.plan, JOB) for choice in found.choices]
    weighed = weigh(space(16), None, given)
    for one, other in zip(found.choices, weighed.choices, strict=True):
        assert one.plan.label == other.plan.label and one.memory == other.memory and one.time == other.time


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dp3", "--global-batch 64 is not divisible by dp=3"),
        ("dp8 mb3", "cannot be split into micro-batches of 3"),
        ("dp16", "needs 16 devices, but --gpus is 8"),
        ("tp8 cp4 dp1", "needs 32 devices"),
        ("dp4 pp2 stages=9-9 zero1 mb1", "hold the 32 layers of 8B together"),
        ("dp8 recompute=full(33)", "33 recomputed layers are more than the 32"),
        ("dp1 cp8(ulysses)", None),
    ],
)
def test_plans_that_do_not_suit_the_model_or_the_cluster(words: str, message: str | None) -> None:
    if message is None:
        assert weigh(space(), None, [Candidate.of(ParallelPlan(**parse_plan(words)), JOB)]).choices
        return
    with pytest.raises(PlanError, match=message):
        weigh(space(), None, [Candidate.of(ParallelPlan(**parse_plan(words)), JOB)])


def test_equal_plans_are_one_row() -> None:
    """With a single micro-batch, ZeRO 2 takes the time and the memory of ZeRO 1."""
    found = without_repetitions(search(space(job=dataclasses.replace(JOB, global_batch=8)), top=8), 4)
    stages = [(choice.plan.zero_stage, [plan.zero_stage for plan in rest])
              for choice, rest in zip(found.choices, found.repetitions, strict=True)]  # fmt: skip
    assert stages[0] == (1, [2]) and len({choice.plan for choice in found.choices}) == 4
    assert next(notes(found)) == "1: zero2 in place of zero1 takes the same time and memory"


def test_weights_without_masters_are_said() -> None:
    plans = [Candidate(dp=8, micro_batch_size=1), Candidate(dp=8, zero_stage=1, micro_batch_size=1)]
    small = dataclasses.replace(JOB, global_batch=8)
    assert any("zero0 updates the 16-bit weights" in note for note in notes(weigh(space(job=small), None, plans)))
    whole = small.in_32_bits()
    (note,) = notes(weigh(space(job=whole), None, plans))
    assert "attention in float32" in note
    assert not list(notes(weigh(space(job=small.in_32_bits(may_autocast=True)), None, plans)))


def test_plans_with_masters_come_first() -> None:
    """Of one sequence on two devices, the fastest plan shards nothing over data ranks, and so has no masters."""
    one = dataclasses.replace(JOB, global_batch=1)
    by_time = search(space(gpus=2, job=one), top=60, budget=2**40)
    found = search(space(gpus=2, job=dataclasses.replace(one, prefers_masters=True)), top=60, budget=2**40)
    stages = [choice.plan.zero_stage for choice in found.choices]
    assert by_time.choices[0].plan.zero_stage == 0 and stages[0] > 0
    kept = stages.index(0)
    assert all(stages[:kept]) and not any(stages[kept:])
    lines = explain.text(found, changed=()).splitlines()
    starred = [" * " in line for line in lines[3 : 3 + len(stages)]]
    assert starred == [not stage for stage in stages] and any(line.startswith("   * zero0 updates") for line in lines)


def test_the_smallest_cluster() -> None:
    """Of the sizes in order, the first that is fast enough; all smaller ones take longer."""
    budget = Budget(tokens=10**11)

    def find(cluster: Cluster, job: Job) -> Any:
        return search(dataclasses.replace(space(), cluster=cluster, job=job), top=1)

    rows = smallest_cluster(find, space().cluster, JOB, budget, 8.0, EIGHT.flops(JOB.seq_len))
    assert is_met(rows, 8.0) and [row.value for row in rows] == sorted({row.value for row in rows})
    assert all(row.bill is None or row.bill.days > 8.0 for row in rows[:-1])
    assert not is_met(smallest_cluster(find, space().cluster, JOB, budget, 0.01, EIGHT.flops(4096))[-1:], 0.01)
    assert "efficiency" in sweep_text("gpus", rows)


def test_a_row_without_a_plan_has_the_reason() -> None:
    row = row_of(7, lambda: search(space(job=dataclasses.replace(JOB, global_batch=8 * 3)), budget=1.0), None)
    assert row.speed == 0 and "no plan fits: the leanest" in str(row.reason)
    assert "gpus=7: no plan fits" in sweep_text("gpus", [row])
