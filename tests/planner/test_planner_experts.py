"""The planner's estimates for models with experts: parameters, memory, exchanges, and which ranks may share them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from benchmarks.published_runs.other_runtimes import OtherJob, OtherModel
from conformance.families.expert_models import EXPERTS, build
from conformance.families.models import model_types
from meshwright.choose.model_sizes import against_tensor, describe_model
from meshwright.errors import PlanError
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.roles.blocks.experts import is_experts
from meshwright_plan.answers.explain import as_dict, own_text
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.layer_shape import ExpertShape, LayerShape
from meshwright_plan.job.shapes import ModelShape, describe, stated_experts
from meshwright_plan.machine.hardware import Cluster, Coefficients, device
from meshwright_plan.memory.activations import saved_activations
from meshwright_plan.memory.footprint import footprint
from meshwright_plan.memory.held_states import parameters
from meshwright_plan.memory.peak import peak_memory
from meshwright_plan.search.search import search, weigh
from meshwright_plan.search.space import Space, check_plan
from meshwright_plan.time.step import StepModel
from meshwright_tools.plan_page.data import describe_ranks, plan_command
from support.tiers import crossings

QWEN = ModelShape(
    name="30B-A3B",
    runs=(
        LayerShape(
            count=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, ffn=0,
            experts=ExpertShape(count=128, chosen=8, hidden=2048, width=768, router=128 * 2048),
        ),
    ),
    vocab=151936,
)  # fmt: skip
JOB = Job(seq_len=4096, global_batch=64)


FAMILIES = sorted(EXPERTS.keys() & set(model_types()))  # an older transformers lacks the newest
# Experts that do not implement transformers' experts interface.
UNPLANNED = dict.fromkeys(("dbrx", "doge", "jetmoe", "llama4_text", "longcat_flash"), "mixture-of-experts")
UNPLANNED["qwen4_exp_text"] = "could not be run on tensors without values"
SOME = ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "qwen3_next", "llama4_text"]


@pytest.mark.parametrize("family", crossings(FAMILIES, only=[name for name in FAMILIES if name not in SOME]))
def test_the_modules_show_all_and_active_parameters(family: str) -> None:
    """Exact but for vectors outside of layers, also from the weights of a rank of ep: the config makes a model anew."""
    with torch.device("meta"):
        model: Any = build(family)
    options = ToDistributedConfig()
    if family in UNPLANNED:
        with pytest.raises(PlanError, match=UNPLANNED[family]):
            describe_model(model, options)
        return
    experts = [module for module in model.modules() if is_experts(module)]
    whole = sum(p.numel() for p in model.parameters())
    weights = [p for module in experts for p in module.parameters()]
    hidden, count = model.get_input_embeddings().weight.shape[1], len(weights[0])
    for weight in weights:
        weight.data = weight.data[:1]
    shape = describe_model(model, options)
    [chosen] = {run.experts.chosen for run in shape.runs if run.experts}
    idle = sum(w.numel() for w in weights) * (count - chosen)  # each weight has one expert left
    assert 0 <= whole - shape.parameters < hidden and chosen in (1, 2, 3)
    assert whole - idle - shape.active_parameters == whole - shape.parameters
    assert sum(run.count for run in shape.runs if run.experts) == len(experts)
    assert sum(shape.roles.values()) == shape.parameters
    with pytest.raises(PlanError, match="mixture-of-experts"):  # its config alone is not read as that of a dense model
        describe(model.config)


def test_sizes_of_a_published_model() -> None:
    assert round(QWEN.parameters / 1e9, 1) == 30.5 and round(QWEN.active_parameters / 1e9, 2) == 3.35
    dense = dataclasses.replace(QWEN, runs=(dataclasses.replace(QWEN.runs[0], experts=None, ffn=8 * 768),))
    assert QWEN.flops(4096) == pytest.approx(dense.flops(4096), rel=0.01)  # a router more
    assert stated_experts({"text_config": {"num_experts": 8}, "num_experts_per_tok": 2}) == {"num_experts": 8}


@pytest.mark.parametrize(("dp", "tp", "ep", "copies"), [(4, 1, 1, 4), (4, 1, 2, 2), (2, 2, 2, 2), (2, 2, 4, 1)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_holds_its_share_of_the_experts(dp: int, tp: int, ep: int, copies: int, zero: int) -> None:
    """E / ep experts on a rank, whatever tp is, and ZeRO shards them over the ranks that hold the same ones."""
    plan = Candidate(dp=dp, tp=tp, sequence_parallel=tp > 1, ep=ep, zero_stage=zero)
    members = list(parameters(QWEN, plan))
    expert = 3 * 2048 * 768
    assert sum(m.numel for m in members if m.is_spread) == (48 * 128 * expert // ep if ep > 1 else 0)
    bare = dataclasses.replace(QWEN, runs=(dataclasses.replace(QWEN.runs[0], experts=None, ffn=768),))
    other, held = (footprint(shape, plan, Job(seq_len=512, global_batch=4)) for shape in (bare, QWEN))
    ranks = copies if zero else 1
    state = 12 if zero else 4  # 32-bit masters under ZeRO, 16-bit moments without
    state -= 4 if zero == 3 else 0  # the weights themselves
    more = held.optimizer - other.optimizer
    small = 48 * (expert / tp + 128 * 2048) * state  # the MLP of the other model, and the router of this one
    assert more == pytest.approx(48 * 128 * expert / ep * state / ranks, abs=small)


def test_kept_activations_are_those_of_the_routed_rows() -> None:
    """The formula of the study, T k (2 H + 3 I) b, with a load above the mean."""
    plan = Candidate(dp=8, zero_stage=1, ep=8)
    bare = dataclasses.replace(QWEN, runs=(dataclasses.replace(QWEN.runs[0], experts=None, ffn=1),))
    router, one = 4096 * 128 * 8, 4096 * 2 * 4
    for load in (1.0, 1.5):
        held, less = (
            saved_activations(x, plan, Job(seq_len=4096, global_batch=8, expert_load=load)).runs[0].layer
            for x in (QWEN, bare)
        )
        assert held - less == load * 4096 * 8 * (2 * 2048 + 3 * 768) * 2 + router - one


def test_a_fuller_rank_takes_memory_and_time() -> None:
    plan = Candidate(dp=64, zero_stage=1, ep=8)
    cluster = Cluster(device=device("h100-sxm"), gpus=64)
    model = StepModel(QWEN, cluster, Coefficients(latency=1e-12))
    even, full = JOB, dataclasses.replace(JOB, expert_load=2.0)
    assert peak_memory(QWEN, plan, full).total > 1.2 * peak_memory(QWEN, plan, even).total
    assert model.step(plan, full).experts == pytest.approx(2 * model.step(plan, even).experts, rel=0.02)
    alone = dataclasses.replace(plan, ep=1)  # all tokens stay on their rank, whose experts get as many as ever
    assert model.step(alone, full) == model.step(alone, even)
    with pytest.raises(PlanError, match=r"--expert-load=0\.5 must be at least 1"):
        Job(seq_len=8, global_batch=8, expert_load=0.5)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("ep", [8, 16])
def test_exchanges_take_the_slower_of_their_links(ep: int, own: bool) -> None:
    """A rank's copies to 7 ranks of its node, and to 8 of the other; other libraries send one to each node."""
    cluster, k = Cluster(device=device("h100-sxm"), gpus=16), Coefficients(latency=1e-12)
    model = (StepModel if own else OtherModel)(QWEN, cluster, k)
    job = OtherJob(seq_len=4096, global_batch=JOB.global_batch)
    step = model.layer(Candidate(dp=16, zero_stage=1, ep=ep), job)
    row = 4096 * 2048 * 2
    reached = ep * (1 - (1 - 1 / ep) ** 8)  # ranks that get a copy of a token
    fast, slow = cluster.fast * k.fast_link, cluster.slow * k.slow_link
    inside = row * reached / ep * (7 if own or ep == 8 else 15) / fast
    across = row * (reached * 8 / 16 if own else 2 * (1 - 0.5**8) / 2) / slow if ep == 16 else 0.0
    assert step.experts == pytest.approx(4 * max(inside, across), rel=1e-6)
    again = model.layer(Candidate(dp=16, zero_stage=1, ep=ep, recompute="full"), job)
    assert again.recompute == pytest.approx(step.forward)  # with its two exchanges, which makes six


def test_the_text_and_the_words_of_the_page_show_experts() -> None:
    """The size of an exchange is that of the study's example but for copies: 5.25 of 8 rows travel to 8 ranks."""
    short = dataclasses.replace(QWEN, runs=(dataclasses.replace(QWEN.runs[0], count=4),))
    job = Job(seq_len=4096, global_batch=8, expert_load=1.5)
    space = Space(shape=short, cluster=Cluster(device=device("h100-sxm"), gpus=8), job=job)
    found = weigh(space, None, [Candidate(dp=8, ep=8, zero_stage=1)])
    text = own_text(found, best=None, budget=None)
    assert "B active) in bfloat16" in text and "dp8 ep8 zero1" in text
    size = 1.5 * 4096 * 8 * (1 - (7 / 8) ** 8) * 2048 * 2 * 7 / 8 / 2**20
    assert f"16 on a rank, which sends {size:,.0f} MiB in each of 4 exchanges" in text and "load 1.5" in text
    assert describe_ranks(found.choices[0].plan).endswith("experts over 8 ranks, ZeRO-1")
    assert "--expert-load 1.5" in plan_command(found, "m")
    assert as_dict(found)["model"]["experts"] == 128  # type: ignore[index]


def test_small_experts_multiply_less_efficiently() -> None:
    cluster = Cluster(device=device("h100-sxm"), gpus=8)
    model = StepModel(QWEN, cluster, Coefficients())
    few, many = (
        model.layer(Candidate(dp=8, zero_stage=1, ep=8, micro_batch_size=m), Job(seq_len=256, global_batch=64)).matmul
        / m
        for m in (1, 8)
    )
    assert few > 1.3 * many


def test_experts_that_ranks_of_tp_hold_twice_are_reduced() -> None:
    model = StepModel(QWEN, Cluster(device=device("h100-sxm"), gpus=4), Coefficients())
    whole, half = (Candidate(tp=4, sequence_parallel=True, ep=ep, gradient_accumulation_steps=8) for ep in (4, 2))
    assert model.overlaps(whole, JOB, 0.0, 0.0) == []
    (overlap, _) = model.overlaps(half, JOB, 0.0, 0.0)
    assert overlap.seconds == pytest.approx(model.ring(model.stage_parameters(half)[1] * JOB.element_bytes, 2, 2))


def test_which_ranks_may_share_experts() -> None:
    cluster = Cluster(device=device("h100-sxm"), gpus=16)
    space = Space(shape=QWEN, cluster=cluster, job=JOB)
    regions = list(space.regions())
    assert {plan.ep for plan in regions} == {1, 2, 4, 8, 16}
    assert all(plan.can_share_experts(plan.ep) for plan in regions)
    for ep, ranks in itertools.product(range(1, 17), (plan for plan in regions if plan.pp == plan.ep == 1)):
        try:
            ParallelPlan(dp=ranks.dp, cp=ranks.cp, tp=ranks.tp, ep=ep, sequence_parallel=ranks.tp > 1)
        except PlanError:
            assert not ranks.can_share_experts(ep)
        else:
            assert ranks.can_share_experts(ep)
    four = dataclasses.replace(QWEN.runs[0].experts, count=4)
    few = dataclasses.replace(QWEN, runs=(dataclasses.replace(QWEN.runs[0], experts=four),))
    space = Space(shape=few, cluster=cluster, job=JOB)
    assert max(plan.ep for plan in space.regions()) == 4
    assert space.pruned["ep=8"] == "more ranks than the 4 experts of a layer"
    odd = Space(shape=QWEN, cluster=cluster, job=dataclasses.replace(JOB, seq_len=4095))
    assert all(
        plan.tp == 1 or plan.cp > 1 for plan in odd.regions()
    )  # cp pads; experts under tp need sequence parallelism
    dense = dataclasses.replace(QWEN, runs=(dataclasses.replace(QWEN.runs[0], experts=None, ffn=768),))
    assert all(plan.ep == 1 for plan in Space(shape=dense, cluster=cluster, job=JOB).regions())
    against = Space(shape=QWEN, cluster=cluster, job=JOB, against={"tp": "a weight has no role"})
    assert all(plan.tp == 1 for plan in against.regions()) and against.pruned["tp=2"] == "a weight has no role"
    whole = Space(shape=QWEN, cluster=cluster, job=JOB, against={"ep": "layers are compiled"})
    assert all(plan.ep == 1 for plan in whole.regions()) and whole.pruned["ep=2"] == "layers are compiled"


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Candidate(dp=256, ep=256), "128 experts in a layer, which 256 ranks cannot share"),
        (Candidate(tp=2), "write tp2\\+sp"),
    ],
)
def test_a_plan_that_cannot_spread_the_experts_is_refused(plan: Candidate, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check_plan(QWEN, plan)


def test_a_plan_under_which_mixers_are_cut_beside_experts_has_no_estimate() -> None:
    with torch.device("meta"):
        hybrid = build("qwen3_next")
    reason = against_tensor(hybrid)
    said = "is cut by heads under tp, which the planner does not estimate beside experts"
    assert reason == f"model.layers.1.linear_attn {said}"
    space = Space(shape=QWEN, cluster=Cluster(device=device("h100-sxm"), gpus=2), job=JOB, against={"tp": reason})
    with pytest.raises(PlanError, match=said):
        weigh(space, None, [Candidate(tp=2, sequence_parallel=True, micro_batch_size=JOB.global_batch)])


def test_slices_of_experts_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match="etp=2 cuts experts into slices"):
        Candidate.of(ParallelPlan(dp=4, ep=2, etp=2), JOB)


def test_a_search_spreads_experts_that_do_not_fit_whole() -> None:
    short = dataclasses.replace(QWEN, runs=(dataclasses.replace(QWEN.runs[0], count=12),))
    job, cluster = Job(seq_len=4096, global_batch=8), Cluster(device=device("a100-40"), gpus=8)
    found = search(Space(shape=short, cluster=cluster, job=job, most_zero=1, against={"pp": "none here"}))
    assert found.choices and all(choice.plan.ep > 1 for choice in found.choices)
    assert f"ep{found.choices[0].plan.ep}" in found.choices[0].plan.label and "ep=1" not in found.binding
    best, flops = found.choices[0], short.flops(4096) * 8 * 4096
    assert best.mfu == pytest.approx(flops / (best.time.total * 8 * device("a100-40").flops))  # of active parameters
