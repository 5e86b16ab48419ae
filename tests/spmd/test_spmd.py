"""The static check: nothing to find in what the runtime makes of families, and every planted fault is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import meshwright as mw
from conformance.families.models import build
from conformance.spmd import check_plan
from conformance.spmd.types import Kind, Typed, TypeMismatch, join
from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.parallel.gradients.buckets import Bucket
from meshwright.parallel.tensor_parallel.block_boundary import BlockHooks
from meshwright.parallel.tensor_parallel.sequence_parallel import SequenceSharding
from meshwright.parallel.tensor_parallel.vocab_parallel import VocabParallelHead
from meshwright.pipeline.pipeline_forward import PipelineForward
from meshwright.roles import Role
from meshwright.roles.blocks import Attention
from meshwright.roles.blocks.head_layout import HeadLayout
from support import anatomies
from support.parity import crossed
from support.planted_hooks import of_runtime
from support.tiers import crossings

PLANS = {
    "tp2": mw.ParallelPlan(tp=2),
    "tp2+sp": mw.ParallelPlan(tp=2, sequence_parallel=True),
    "dp2 tp2+sp zero3, micro-batches, recompute": mw.ParallelPlan(
        dp=2, tp=2, sequence_parallel=True, zero_stage=3, gradient_accumulation_steps=2, recompute="full"
    ),
    "dp2 zero1": mw.ParallelPlan(dp=2, zero_stage=1),
}
# Llama; queries, keys and values fused by kind and by group; Conv1D; norms of heads and of a sharded width; soft caps;
# alibi; latent attention; one key head for all. `make families` checks all of them.
FAMILIES = ("llama", "phi3", "falcon", "gpt2", "qwen3", "olmo2", "gemma2", "bloom", "minicpm3", "gpt_bigcode")
EACH_ONCE = [*(("llama", plan) for plan in PLANS), *((family, "tp2+sp") for family in FAMILIES[1:])]


@pytest.mark.parametrize(
    ("family", "plan"),
    crossings(
        [*EACH_ONCE, *crossed(FAMILIES[1:], [plan for plan in PLANS if plan != "tp2+sp"])],
        but=EACH_ONCE,
    ),
)
def test_nothing_is_found_in_a_family(family: str, plan: str) -> None:
    assert check_plan(lambda: build(family).float(), PLANS[plan]) == []


def test_nothing_is_found_with_whole_experts() -> None:
    """Each rank routes its own tokens; qwen2_moe has an MLP for every token beside them."""
    for name in ("mixtral", "qwen2_moe"):
        assert check_plan(lambda name=name: anatomies.build(name).float(), PLANS["tp2+sp"]) == []
    with pytest.raises(mw.PlanError, match=r"ParallelPlan.ep=2.*meshwright verify"):
        check_plan(lambda: anatomies.build("mixtral").float(), mw.ParallelPlan(tp=2, sequence_parallel=True, ep=2))


def test_nothing_is_found_with_adapters() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj", "o_proj", "up_proj", "down_proj"], r=2)
    for plan in PLANS.values():
        assert check_plan(lambda: get_peft_model(build("llama").float(), config), plan) == []


STAGES = {
    "tp2+sp pp2(zb-h1), zero1": mw.ParallelPlan(
        pp=2, dp=2, tp=2, sequence_parallel=True, schedule="zb-h1", zero_stage=1
    ),
    "tp2 pp2": mw.ParallelPlan(pp=2, tp=2),
}


@pytest.mark.parametrize("plan", STAGES)
def test_nothing_is_found_in_the_stages_of_a_tied_model(plan: str) -> None:
    assert check_plan(lambda: build("gemma2", tie_word_embeddings=True).float(), STAGES[plan]) == []


def test_a_fault_in_a_later_stage_and_an_unsummed_tie_are_named() -> None:
    def hooked() -> nn.Module:
        model: Any = build("gemma2", tie_word_embeddings=True).float()
        tanh = lambda module, args, output: output.tanh()  # noqa: E731
        tanh.watches_parts = True  # type: ignore[attr-defined]
        model.model.layers[1].self_attn.o_proj.register_forward_hook(tanh)
        return model

    with mock.patch.object(PipelineForward, "_sum_ties", lambda *_: None):
        findings = [str(finding) for finding in check_plan(hooked, STAGES["tp2 pp2"])]
    assert any("model.layers.1.self_attn.o_proj: tanh" in finding for finding in findings), findings
    assert any("embed_tokens.weight" in finding and "no sum over its stages" in finding for finding in findings), (
        findings
    )


def forgotten(tensor: Any, tp: int = 1, **_: Any) -> TensorLayout:
    return TensorLayout(shape=tensor.shape, cuts=(("tp", RowLayout.replicated(tensor.shape[0], tp)),))


@of_runtime
def bias_stays(self: BlockHooks, module: nn.Module, args: Any) -> None:
    self._pass.projections += 1
    self._bias = self._row._parameters["bias"]


def shifted(self: HeadLayout) -> RowLayout:
    """Runs of queries that begin and end in the middle of a head."""
    whole = HeadLayout.query_rows(self)
    half, part = whole.size // 2, self.head_dim // 2
    return RowLayout(0, whole.size, (((0, part), (half + part, whole.size)), ((part, half + part),)))


def with_hook(path: str, hook: Callable[..., Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = build("llama").float()
        hook.watches_parts = True  # type: ignore[attr-defined]
        model.get_submodule(path).register_forward_hook(hook)
        return model

    return make


def llama() -> nn.Module:
    return build("llama").float()


def phi3() -> nn.Module:
    return build("phi3").float()


def patch(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, value)


def rows_by_head(role: Role, layout: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.dict(Attention.rows, {role: lambda block, _: layout(block.heads)})


O_PROJ, UP_PROJ = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.up_proj"

# What is wrong -> (the model, the fault, the plan, the module or parameter that is named, a word of the problem).
FAULTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str, str, str]] = {
    "a norm's gradient is not summed": (
        llama, patch(TensorLayout, "whole", forgotten), "tp2+sp", "layers.0.input_layernorm", "nothing sums it",
    ),
    "the sum of norms' gradients is left out": (
        llama, patch(Bucket, "average_copies", lambda *_: None), "tp2+sp", "model.norm.weight", "no all-reduce",
    ),
    "a bias is added on each rank": (
        llama, patch(BlockHooks, "_lift_bias", bias_stays), "tp2", O_PROJ, "each rank of tp would add it",
    ),
    "the rows of a fused matrix are taken in another order": (
        phi3, rows_by_head(Role.QKV, HeadLayout.grouped_rows), "tp2", "self_attn.qkv_proj", "not of the same matrix",
    ),
    "a head is cut in two": (
        llama, rows_by_head(Role.Q, shifted), "tp2", "self_attn.q_proj", "are not one head",
    ),
    "a hook takes a partial sum for the whole": (
        with_hook(O_PROJ, lambda module, args, output: output.tanh()), nullcontext, "tp2", O_PROJ, "partial sum",
    ),
    "a hook takes a shard's norm": (
        with_hook(UP_PROJ, lambda module, args, output: output / output.norm()), nullcontext, "tp2", UP_PROJ,
        "only its own part",
    ),
    "a block's input is not gathered": (
        llama, patch(SequenceSharding, "gather", lambda self, x, *_: x), "tp2+sp", "q_proj", "its own input only",
    ),
    "the head's input does not sum its gradients": (
        llama, patch(VocabParallelHead, "__init__", lambda self, head, *_: None), "tp2", "lm_head", "nothing sums it",
    ),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    model, plant, plan, where, what = FAULTS[fault]
    with plant():
        findings = check_plan(model, PLANS[plan])
    assert any(where in finding.module and what in finding.problem for finding in findings), findings


def test_a_parameter_in_no_reduction_is_named() -> None:
    """A gradient that stays one data-parallel rank's own."""
    from meshwright.optim import trained_parameters as trained

    def all_but_one(parameters: Any, **options: Any) -> list[Bucket]:
        return original([p for p in parameters if "lm_head" not in p.meshwright.name], **options)

    original = trained.make_buckets
    with mock.patch.object(trained, "make_buckets", all_but_one):
        findings = check_plan(llama, mw.ParallelPlan(dp=2))
    assert [finding.module for finding in findings] == ["lm_head.weight"]


def kinds() -> Iterator[tuple[list[Typed], Kind | None]]:
    invariant, replicated, varying = (Typed(kind, True) for kind in list(Kind)[:3])
    constant = Typed(Kind.INVARIANT, False)
    yield [], None
    yield [invariant, invariant], Kind.INVARIANT
    yield [replicated, constant], Kind.REPLICATED
    yield [varying, replicated], Kind.VARYING
    yield [varying, constant], Kind.VARYING
    yield [constant, Typed(Kind.REPLICATED, False)], Kind.INVARIANT


@pytest.mark.parametrize(("inputs", "expected"), list(kinds()))
def test_types_join(inputs: list[Typed], expected: Kind | None) -> None:
    assert join(inputs) is expected


@pytest.mark.parametrize("other", [Kind.VARYING, Kind.REPLICATED, Kind.PARTIAL])
def test_a_replicated_gradient_does_not_mix(other: Kind) -> None:
    with pytest.raises(TypeMismatch):
        join([Typed(Kind.INVARIANT, True), Typed(other, True)])


def test_it_wants_a_process_of_its_own() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="process of its own"):
            check_plan(llama, PLANS["tp2"])
    finally:
        torch.distributed.destroy_process_group()
