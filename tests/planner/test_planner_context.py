"""Context parallelism in the planner: which methods it weighs, what they send, and why it takes one of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import meshwright as mw
from benchmarks.published_runs.other_runtimes import OtherJob, OtherModel
from conformance.families.models import build as build_family
from meshwright.distribute.decide import call_of, runnable_plans
from meshwright.plan.parts import METHODS
from meshwright_plan.answers import explain
from meshwright_plan.answers.explain import method_reasons
from meshwright_plan.context_cost import exchanges
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.layer_shape import traits_of
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.hardware import Cluster, Coefficients, device
from meshwright_plan.memory.peak import held_activations
from meshwright_plan.search.search import Search, search
from meshwright_plan.search.space import Space
from meshwright_plan.time.layer import StepTime
from meshwright_plan.time.step import StepModel, boundary_bytes
from support.models import build
from support.shapes import changed

EIGHT = ModelShape.of(name="8B", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256)
LONG = Job(seq_len=131_072, global_batch=4)


def find(shape: ModelShape = EIGHT, job: Job = LONG, *, gpus: int = 32, **more: Any) -> Search:
    return search(Space(shape=shape, cluster=Cluster(device=device("h100-sxm"), gpus=gpus), job=job, **more))


def test_sequences_longer_than_a_device_are_split_over_cp_without_allow_future() -> None:
    found = find()
    plan = found.choices[0].plan
    assert plan.cp > 1 and all(choice.plan.runs_today for choice in found.choices)
    lines = list(method_reasons(found, plan))
    assert len(lines) >= 3 and lines[0].startswith(f"{plan.context}: a rank sends")
    assert all("times as long" in line or "cannot be shared" in line for line in lines[1:])
    text = explain.text(found, changed=())
    assert f"Method of cp={plan.cp}:" in text and all(line in text for line in lines)
    assert not list(method_reasons(found, Candidate()))


@pytest.mark.parametrize("length", [100_001, 131_072])
def test_a_length_need_not_be_divisible(length: int) -> None:
    assert find(job=dataclasses.replace(LONG, seq_len=length)).choices[0].plan.cp > 1


def test_heads_and_short_chunks_rule_methods_out_with_the_reason() -> None:
    space = Space(
        shape=changed(EIGHT, heads=12, kv_heads=4), cluster=Cluster(device=device("h100-sxm"), gpus=8),
        job=Job(seq_len=8192, global_batch=8),
    )  # fmt: skip
    of_eight = {(r.context, r.ulysses) for r in space.regions() if r.cp == 8}
    assert of_eight == {("gather", None), ("ring", None), ("hybrid", 4)}
    assert space.pruned["cp=8(ulysses)"] == "12 query and 4 key heads cannot be shared by 8 ranks"
    short = dataclasses.replace(space, job=dataclasses.replace(space.job, seq_len=2047))
    assert {region.cp for region in short.regions()} == {1}
    assert "chunks of fewer than 512" in short.pruned["cp=2"]


def test_families_whose_attention_cannot_be_split() -> None:
    """Bloom's layers do not call transformers' attention interface; GraniteSWA's sinks are read for all heads."""
    for family, methods in (("bloom", set()), ("granite_swa", {"gather", "ring"}), ("llama", {*METHODS})):
        shape = changed(EIGHT, traits=traits_of(family, {}))
        space = Space(shape=shape, cluster=Cluster(device=device("h100-sxm"), gpus=8), job=LONG)
        assert {region.context for region in space.regions() if region.cp > 1} == methods
    model = build_family("bloom")
    plans = runnable_plans(call_of(model, mw.ToDistributedConfig(), None, torch.device("cpu")))
    assert "attention of its own" in str(plans.refusal_when_cut(Candidate(cp=2)))


def test_context_and_pipeline_parallelism_together() -> None:
    """Each rank of cp sends its own tokens from stage to stage, and holds the activations of its own tokens."""
    stages, parts = Candidate(pp=2, gradient_accumulation_steps=4), Candidate(cp=4, context="ring")
    both = dataclasses.replace(stages, cp=4, context="ring")
    assert both.runs_today and boundary_bytes(EIGHT, both, LONG) == boundary_bytes(EIGHT, stages, LONG) / 4
    # The first of two stages holds two micro-batches of half the layers.
    assert held_activations(EIGHT, both, LONG, 0) == pytest.approx(held_activations(EIGHT, parts, LONG, 0))
    space = Space(shape=EIGHT, cluster=Cluster(device=device("h100-sxm"), gpus=8), job=LONG)
    assert {(region.cp, region.pp) for region in space.regions()} >= {(2, 2), (2, 4), (4, 2)}


def sent(context: str, cp: int, tp: int = 1, ulysses: int | None = None) -> tuple[float, float]:
    """The elements that a rank sends in forward and in backward for each of its positions; a 32-bit one counts two."""
    plan = Candidate(cp=cp, tp=tp, context=context, ulysses=ulysses)
    phases = exchanges(EIGHT.runs[0], plan, Job(seq_len=8192, global_batch=1))
    share = {"send": lambda x: 1.0}
    totals = [sum(x.count * x.bytes * share.get(x.kind, lambda x: (x.ranks - 1) / x.ranks)(x) for x in phase)
              for phase in phases]  # fmt: skip
    return totals[0] / (8192 / cp) / 2, totals[1] / (8192 / cp) / 2


def test_what_each_method_sends() -> None:
    """q = 4096 and v = 1024 elements per position; see the formulas in evidence/planner.md."""
    q, v = 4096, 1024
    for c in (2, 4, 8):
        assert sent("gather", c) == (2 * v * (c - 1), 3 * 2 * v * (c - 1))
        assert sent("ulysses", c) == ((c - 1) / c * (2 * q + 2 * v),) * 2
        assert sent("ring", c) == ((c - 1) * 2 * v, (c - 1) * 2 * v + 2 * c * 2 * v)
    assert sent("gather", 4, tp=2) == (v * 3, 9 * v)
    assert sent("ulysses", 16) == (15 / 16 * (2 * q + 2 * 16 * 128),) * 2  # each of 8 key heads goes to two ranks
    hops = (1, 1 + 2 * 2)  # a ring of two groups
    assert sent("hybrid", 8, ulysses=4) == tuple(3 / 4 * (2 * q + 2 * v) + n * 2 * v for n in hops)


def steps(shape: ModelShape) -> dict[str, StepTime]:
    """The step of each method, and "other" for the ring of other libraries."""
    of = shape, Cluster(device=device("h100-sxm"), gpus=8), Coefficients()
    plans = {
        name: Candidate(cp=8, context=name, gradient_accumulation_steps=4) for name in ("gather", "ulysses", "ring")
    }
    found = {name: StepModel(*of).step(plan, LONG) for name, plan in plans.items()}
    job = OtherJob(seq_len=LONG.seq_len, global_batch=LONG.global_batch)
    return {**found, "other": OtherModel(*of).step(plans["ring"], job)}


def test_time_by_method() -> None:
    """All methods run flash kernels. They differ in what they send, and in the results that they merge."""
    step = steps(EIGHT)
    assert step["other"].attention == step["ulysses"].attention
    merging = {name: step[name].attention / step["ulysses"].attention for name in ("gather", "ring")}
    assert 1 < merging["gather"] < merging["ring"] < 1.1
    assert step["other"].context < step["ring"].context < step["gather"].context  # hidden by attention
    assert all(min(time.parts.values()) >= 0 for time in step.values())


def test_time_without_flash_kernels() -> None:
    """With soft caps, "gather" runs attention again in backward, and the blocks of a ring move their scores."""
    step = steps(changed(EIGHT, traits=dataclasses.replace(EIGHT.traits, keeps_scores=True)))
    ratio = step["gather"].attention / step["other"].attention
    assert ratio == pytest.approx(4.5 / 3.5)  # the forward is 1, the backward 2.5
    assert step["ring"].attention > 5 * step["other"].attention


def test_a_method_that_the_model_cannot_use_is_not_picked() -> None:
    """FlexAttention gives a ring no results of blocks to merge."""
    model = build("llama", attn_implementation="flex_attention")
    plans = runnable_plans(call_of(model, mw.ToDistributedConfig(), None, torch.device("cpu")))
    assert plans.refusal_when_cut(Candidate(cp=2)) is None
    assert "flex_attention" in str(plans.refusal_when_cut(Candidate(cp=2, context="ring")))
