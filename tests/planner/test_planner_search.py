"""The search finds the fastest plan that fits, keeps a reason for the rest, and says what would change the answer."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from meshwright.errors import PlanError
from meshwright_plan.answers import explain
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.hardware import Cluster, HardwareProfile, device
from meshwright_plan.memory.peak import peak_memory
from meshwright_plan.search.search import Search, search
from meshwright_plan.search.space import Space
from meshwright_plan.time.step import StepModel
from support.shapes import changed
from support.tiers import crossing, nightly

EIGHT = ModelShape.of(name="8B", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256)
HUGE = changed(EIGHT, name="405B", layers=126, hidden=16384, heads=128, ffn=53248)
TINY = changed(EIGHT, name="tiny", layers=4, hidden=256, heads=8, ffn=1024, vocab=4096, head_dim=32)


@functools.cache
def find(
    shape: ModelShape = EIGHT, *, gpus: int = 64, gpu: str = "h100-sxm", seq: int = 8192, batch: int = 512,
    budget: float | None = None, against: str = "", **more: Any,
) -> Search:  # fmt: skip
    cluster, job = Cluster(device=device(gpu), gpus=gpus), Job(seq_len=seq, global_batch=batch)
    space = Space(shape=shape, cluster=cluster, job=job, against={against: "it cannot"}, **more)
    return search(space, budget=budget)


@pytest.mark.parametrize("allow_future", [False, True])
@pytest.mark.parametrize(("shape", "gpus"), [(TINY, 4), crossing(EIGHT, 8), (EIGHT, 16)])
def test_no_legal_plan_that_fits_is_faster(shape: ModelShape, gpus: int, allow_future: bool) -> None:
    """Against brute force over the whole space, first-n recompute aside: neither pruning changes the answer."""
    found = find(shape, gpus=gpus, seq=4096, batch=16, allow_future=allow_future)
    job, cluster = found.job, found.cluster
    space = Space(shape=shape, cluster=cluster, job=job, allow_future=allow_future)
    model = StepModel(shape, cluster, HardwareProfile(name="catalogue").coefficients)
    best = float("inf")
    for region in space.regions():
        for micro in space.micro_batches(region):
            for zero in space.zero(region):
                for recompute in space.recompute(region):
                    plan = space.candidate(region, micro, zero, recompute)
                    if peak_memory(shape, plan, job).total <= found.budget:
                        best = min(best, model.step(plan, job).total)
    assert found.choices[0].time.total <= best * (1 + 1e-12)


@pytest.mark.quick
@pytest.mark.parametrize("allow_future", [False, True])
def test_choices_are_legal_ranked_and_fit(allow_future: bool) -> None:
    found = find(allow_future=allow_future)
    times = [choice.time.total for choice in found.choices]
    assert len(times) == 5 and times == sorted(times)
    for choice in found.choices:
        plan = choice.plan
        assert plan.world_size == 64 and plan.global_batch == 512
        assert choice.memory.total <= found.budget
        assert allow_future or plan.runs_today
        assert 0.2 < choice.mfu < 0.7


def test_search_is_deterministic() -> None:
    assert find(allow_future=True) == find.__wrapped__(allow_future=True)


def test_405b_on_16384_devices_simulates_few_of_the_plans() -> None:
    found = find(HUGE, gpus=16384, batch=2048, allow_future=True)
    assert found.considered > 1000 and found.choices[0].plan.pp > 1
    assert found.simulated <= 20  # of 7,120: the bounds rule out the others


def test_batches_that_exceed_a_device_are_not_weighed() -> None:
    """100,000 sequences of a million tokens divide into 29,096 plans; nearly all hold more than a device per layer."""
    found = find(gpus=4096, seq=1_000_000, batch=100_000)
    assert found.choices and found.weighed < found.considered / 2
    assert {choice.plan.micro_batch_size for choice in found.choices} == {1}


def test_every_pruned_axis_has_a_reason() -> None:
    found = find(changed(EIGHT, heads=24, kv_heads=8, head_dim=128), gpus=64, batch=48)
    reasons = dict(explain.reasons(found))
    assert "heads=24 is not divisible by 16" not in reasons  # the domain of 8 comes first
    assert any("fast domain" in reason for reason in reasons.values())
    assert any("48 sequences" in reason for name, reason in reasons.items() if name.startswith("dp="))


@pytest.mark.parametrize(
    ("shape", "gpus", "gpu", "said"),
    [
        (EIGHT, 1, "rtx-4090", "--gpus"),
        (EIGHT, 1, "a100-80", "--gpus"),
        (changed(EIGHT, layers=64), 8, "rtx-4090", "--gpus 16"),  # whole nodes
        nightly(HUGE, 64, "h100-sxm", "--gpus"),
        crossing(HUGE, 16, "h100-sxm", "--gpus"),
    ],
)
def test_no_fit_names_the_smallest_change(shape: ModelShape, gpus: int, gpu: str, said: str) -> None:
    with pytest.raises(PlanError, match="no plan fits") as caught:
        explain.text(find(shape, gpus=gpus, gpu=gpu, batch=256))
    assert said in str(caught.value) and "too much" in str(caught.value)


def test_a_model_too_large_for_whole_weights_is_planned_with_stage_3() -> None:
    found = find(HUGE, gpus=256, gpu="h100-sxm", batch=256, against="pp")
    assert {choice.plan.zero_stage for choice in found.choices} == {3}
    assert all(choice.plan.runs_today for choice in found.choices)
    assert "it cannot" in dict(explain.reasons(found)).values()


def test_or_with_stages() -> None:
    found = find(HUGE, gpus=256, gpu="h100-sxm", batch=256, against="cp")
    assert any(choice.plan.pp > 1 and choice.plan.zero_stage < 2 for choice in found.choices)
    assert all(choice.plan.runs_today and choice.plan.recompute != "selective" for choice in found.choices)


def test_what_the_runtime_refuses_is_neither_searched_nor_proposed() -> None:
    """Without these refusals, cp2, tp4 and ZeRO-3 with the state on the host are what would make a plan fit."""

    def refuses(plan: Candidate) -> str | None:
        return "it has hooks" if plan.tp > 1 or plan.zero_stage == 3 else None

    few = {"gpus": 2, "gpu": "a100-40", "seq": 32768, "batch": 2}
    said, free = (str(explain.no_fit(find(**few, **more))) for more in ({"against": "cp", "refuses": refuses}, {}))
    assert all(word in free and word not in said for word in (" cp", " tp", "zero3"))
    assert re.search(r"--gpus 16 \(dp2 pp8 ", said)
    found = find(TINY, batch=64, gpus=4, seq=2048, refuses=refuses)
    assert found.choices and all(refuses(choice.plan) is None for choice in found.choices)
    assert "it has hooks" in found.space.refused.values()


def test_remedy_of_more_devices_holds() -> None:
    found = find(EIGHT, gpus=1, gpu="a100-80", seq=2048, batch=64)
    assert not found.choices
    more = str(explain.no_fit(found)).split("--gpus ")[1].split()[0]
    assert find(EIGHT, gpus=int(more), gpu="a100-80", seq=2048, batch=64).choices


def test_remedy_of_more_memory_holds_for_the_share_that_a_plan_may_fill() -> None:
    found = find(EIGHT, gpus=1, batch=64, budget=device("h100-sxm").memory / 2)
    gibs = float(str(explain.no_fit(found)).split("devices with ")[1].split()[0]) + 0.1  # the text has one decimal
    assert not found.choices and find(EIGHT, gpus=1, batch=64, budget=gibs * 2**30 / 2).choices
    assert not find(EIGHT, gpus=1, batch=64, budget=(gibs - 0.2) * 2**30 / 2).choices


def test_no_legal_plan_is_an_error_with_reasons() -> None:
    with pytest.raises(PlanError, match=r"no legal plan.*3 sequences"):
        find(changed(EIGHT, heads=31, kv_heads=31), gpus=512, batch=3)


def test_changes_answer_three_questions() -> None:
    found = find()
    changed = explain.changes(found)
    assert len(changed) == 3 and all(change.plan for change in changed)
    batch, link, memory = changed
    assert batch.speed >= 0.99 and link.speed <= 1.0 and memory.speed >= 1.0


def test_ties_are_those_within_noise() -> None:
    found = find()
    tied = explain.ties(found)
    first = found.choices[0].time.total
    assert all((c.time.total <= first * (1 + explain.TIE)) == (i < tied) for i, c in enumerate(found.choices))


@pytest.mark.parametrize("prefer_less", [crossing(0.3), 0.5, crossing(0.7)])
def test_a_smaller_budget_never_makes_a_plan_faster(prefer_less: float) -> None:
    whole = find()
    part = find(budget=prefer_less * whole.budget)
    if part.choices:
        assert part.choices[0].time.total >= whole.choices[0].time.total
        assert part.choices[0].memory.total <= prefer_less * whole.budget
