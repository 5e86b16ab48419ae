"""Every dense causal LM of transformers equals one device, as evidence/families.md says; the rest is refused by name.

Tolerance 1e-10 in float64, relative to a tensor's largest value: only the order of sums differs, about 1e-16 a sum.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import meshwright as mw
from conformance.families import page
from conformance.families.expert_models import EXPERTS
from conformance.families.experts_page import without_experts
from conformance.families.models import DENSE, build, model_types
from conformance.families.parity import TOLERANCE, Record, check, differences
from conformance.families.refusals import refusal
from meshwright.parallel.gradients.buckets import Bucket
from meshwright.parallel.tensor_parallel.structure import describe
from meshwright.roles import plan_for
from support.tiers import crossings

FAMILIES = sorted(DENSE.keys() & set(model_types()))  # an older transformers lacks the newest
CHUNKS = [FAMILIES[i::10] for i in range(10)]
ROWS = page.rows(without_experts(page.PAGE.read_text()))
IS_THE_PAGES = f"transformers {transformers.__version__}," in page.PAGE.read_text()  # another version, other rows


def check_all(families: list[str]) -> list[Record]:
    return [check(family) for family in families]


@pytest.mark.parametrize(
    "chunk", crossings(CHUNKS, but=CHUNKS[:1], one_in=2), ids=lambda chunk: f"{chunk[0]} and so on"
)
def test_equals_one_device_as_the_page_says(chunk: list[str], pool2: Any) -> None:
    for record in pool2.run(check_all, chunk, timeout=280)[0]:
        assert record.passes, record
        if not IS_THE_PAGES:
            continue
        verdicts = [page.verdict(x) for x in (record.parity, record.kv, record.tied, record.packed)]
        assert [record.traits, *verdicts] == ROWS[record.family][:5]


def test_the_page_is_about_these_families_and_all_the_others() -> None:
    passed = {family for family, cells in ROWS.items() if len(cells) == 6}
    assert passed == DENSE.keys()
    assert len(passed) >= 60
    if IS_THE_PAGES:
        assert ROWS.keys() | EXPERTS.keys() == set(model_types())


# What a family's config can choose beside what its row of the page was made with.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon, grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "falcon, kv of all heads": ("falcon", {"multi_query": False, "num_kv_heads": 4}),
    "falcon, eager alibi": ("falcon", {"attn_implementation": "eager"}),
    "gpt_bigcode, all heads": ("gpt_bigcode", {"multi_query": False}),
    "bloom, residual from the norm": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "minicpm3, direct queries": ("minicpm3", {"q_lora_rank": None}),
    "opt, norms after": ("opt", {"do_layer_norm_before": False}),
    "olmo2, three of six heads": ("olmo2", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
}


@pytest.mark.parametrize(
    "name",
    crossings(
        [name for name, (family, _) in VARIANTS.items() if family in FAMILIES],
        only=["falcon, grouped", "falcon, kv of all heads"],
    ),
)
def test_variants(name: str, pool2: Any) -> None:
    family, overrides = VARIANTS[name]
    found = pool2.run(differences, family, **overrides)[0]
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize(
    "family",
    crossings(
        sorted({"apertus", "bitnet", "bloom", "ctrl", "gpt2", "granite_swa", "minicpm3", "opt"} & set(FAMILIES)),
        but={"bloom", "gpt2", "minicpm3"} & set(FAMILIES),
    ),
)
def test_without_sequence_parallelism(family: str, pool2: Any) -> None:
    options = {"apply_residual_connection_post_layernorm": True} if family == "bloom" else {}
    found = pool2.run(differences, family, plan=mw.ParallelPlan(tp=2), **options)[0]
    assert max(found.values()) <= TOLERANCE, found


def test_the_only_key_head_without_sequence_parallelism(pool2: Any) -> None:
    found = pool2.run(differences, "llama", plan=mw.ParallelPlan(tp=2), num_key_value_heads=1)[0]
    assert max(found.values()) <= TOLERANCE, found


def test_more_ranks_than_groups(pool4: Any) -> None:
    plan = mw.ParallelPlan(tp=4, sequence_parallel=True)
    options = {"num_attention_heads": 8, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}
    found = pool4.run(differences, "falcon", plan=plan, **options)[0]
    assert max(found.values()) <= TOLERANCE, found


def cross_attention(needs_gradient: bool) -> dict[str, float]:
    states = torch.randn(2, 7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return differences("bart", inputs={"encoder_hidden_states": states.requires_grad_(needs_gradient)})


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_cross_attention(needs_gradient: bool, pool2: Any) -> None:
    found = pool2.run(cross_attention, needs_gradient)[0]
    assert any("encoder_attn" in name for name in found)
    assert max(found.values()) <= TOLERANCE, found


def with_another_order() -> dict[str, float]:
    """GPT-NeoX with its rows cut as if they were ordered by kind."""
    plan = mw.infer_plan(build("gpt_neox"), {"query_key_value": mw.Role.QKV})
    mw.register_plan("gpt_neox", plan)
    try:
        return differences("gpt_neox")
    finally:
        from meshwright.roles import registry

        del registry._PLANS["gpt_neox"]


def without_summing_parts(family: str) -> dict[str, float]:
    original = Bucket.average_copies
    Bucket.average_copies = lambda *_: None  # type: ignore[method-assign]
    try:
        return differences(family)
    finally:
        Bucket.average_copies = original  # type: ignore[method-assign]


def test_wrong_answers_would_be_caught(pool2: Any) -> None:
    # Off by more than 1e-3, ten million times the tolerance.
    assert pool2.run(with_another_order)[0]["logits"] > 1e-3
    assert pool2.run(without_summing_parts, "apertus")[0]["model.layers.0.mlp.act_fn.alpha_p"] > 1e-3
    assert pool2.run(without_summing_parts, "bloom")[0]["transformer.h.0.input_layernorm.weight"] > 1e-3


@pytest.mark.skipif("jetmoe" not in model_types(), reason="this version of transformers does not have the type")
def test_what_is_no_dense_decoder_is_refused_by_name() -> None:
    """An attention that routes its tokens to experts: every rank would route all tokens, if it stayed whole."""
    found = refusal("jetmoe")
    assert found is not None and "no role for model.layers.0.self_attention.kv_proj.weight" in found.message
    assert not IS_THE_PAGES or "jetmoe" in EXPERTS or ROWS["jetmoe"][0] == found.kind


def test_attention_that_reshapes_its_heads_stays_whole_beside_an_encoder() -> None:
    """LED's decoder, which ended in an error of torch about shapes."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 97}
    with torch.device("meta"):
        found = _describe(transformers.LEDForConditionalGeneration(transformers.LEDConfig(**sizes)))
    assert {name.rpartition(".")[2] for name in found.whole} == {"self_attn", "encoder_attn"} and found.blocks


WHOLE = [
    ("stablelm", {"qk_layernorm": True}, "self_attn"),
    ("cohere", {"use_qk_norm": True}, "self_attn"),
    ("gemma4_text", {"attention_k_eq_v": True}, "self_attn"),
    ("gpt2", {"add_cross_attention": True}, "crossattention"),
    ("diffllama", {}, "self_attn"),
]


@pytest.mark.parametrize(("family", "overrides", "kept"), WHOLE)
def test_what_a_variant_gives_no_role_stays_whole(family: str, overrides: dict[str, Any], kept: str) -> None:
    found = _describe(build(family, **overrides))
    assert {name.rpartition(".")[2] for name in found.whole} == {kept} and found.blocks and found.is_sequence_parallel


@pytest.mark.parametrize(("family", "overrides", "kept"), crossings(WHOLE[:3], but=WHOLE[:1]))
def test_a_variant_that_stays_whole(family: str, overrides: dict[str, Any], kept: str, pool2: Any) -> None:
    found = pool2.run(differences, family, **overrides)[0]
    assert max(found.values()) <= TOLERANCE, found


def test_layers_of_which_nothing_can_be_cut_stay_whole() -> None:
    found = _describe(build("rwkv"))
    assert not found.blocks and not found.is_sequence_parallel
    assert {name for name, layout in found.parameters.items() if layout.is_sharded} >= {"rwkv.embeddings.weight"}


def _describe(model: nn.Module) -> Any:
    return describe(model, plan_for(model), tp=2, sequence_parallel=True)
