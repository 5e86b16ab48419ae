"""Models whose attention calls a flash attention package equal one process with the same package, under each plan.

The package is one of plain operations in float64, which transformers itself calls (``support/flash_kernel.py``).
Tolerance 1e-10 of a tensor's largest value: only the order of sums differs, about 1e-16 a sum, and the steps of AdamW
divide tiny differences by tiny moments.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor

import meshwright as mw
from conformance.families.expert_models import build as build_with_experts
from conformance.families.models import build
from meshwright.context import flash
from meshwright.context.flash import FlashCall, PackageKernel, is_right
from meshwright.context.masks import ContextMask, Documents, causal_blocks
from meshwright.errors import PlanError
from meshwright.parallel.batch.flash_rows import FlashRows
from meshwright.parallel.sequence_parts import TokenRun
from support.exact import Float64, relative_difference
from support.flash_kernel import hidden_pairs, installed, with_flash
from support.models import build as build_with_traits
from support.models import labels_for, tokens
from support.parity import pool_for
from support.replicas import uncompared
from support.tiers import crossings
from support.whole_runs import assert_equals_one_process, train_whole

TWO, THREE = "flash_attention_2", "flash_attention_3"
# Windows, soft caps, sinks, several widths of keys and values, norms of queries and keys, and towers of heads.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "gemma2": {},
    "deepseek_v3": {},
    "gpt_oss": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma3_text": {},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "cohere2": {},
    "glm4": {},
    "starcoder2": {},
    "arcee": {},
    "smollm3": {},
    "exaone4": {},
    "helium": {},
    "mixtral": {},
}
PLANS: dict[str, dict[str, Any]] = {
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2, "micro_batch_size": 1},
    "cp2": {"cp": 2},
    "cp2, ulysses": {"cp": 2, "context": "ulysses"},
    "cp2, ring": {"cp": 2, "context": "ring"},
}
FOUR = {
    "cp4, hybrid": {"cp": 4, "context": "hybrid", "ulysses": 2},
    "cp2 x tp2+sp, ring, recompute": {
        "cp": 2,
        "tp": 2,
        "sequence_parallel": True,
        "context": "ring",
        "recompute": "full",
    },
}
SINKS = ("gpt_oss",)


def _positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def batches(*, says_borders: bool) -> list[dict[str, Tensor]]:
    """Rows of one document, padded rows, documents in one row and in several, and documents that borders name.

    Args:
        says_borders: whether the borders are given for rows of documents, as one process needs them.
    """
    found: list[dict[str, Any]] = []
    for step, (rows, length) in enumerate([(4, 11), (4, 12), (1, 19), (4, 16), (1, 13)]):
        ids = tokens(rows, length, seed=step)
        found.append({"input_ids": ids, "labels": labels_for(ids)})
    mask = torch.ones(4, 12, dtype=torch.int64)
    mask[1, -3:] = mask[2, :2] = 0
    found[1] |= {"attention_mask": mask, "labels": found[1]["labels"].masked_fill(mask == 0, -100)}
    found[2]["position_ids"] = _positions(4, 2, 13)[None]
    found[3]["position_ids"] = torch.stack([_positions(5, 11), _positions(16), _positions(5, 11), _positions(1, 9, 6)])
    if says_borders:
        found[3] |= _borders(0, 5, 16, 32, 37, 48, 49, 58, 64)
    found[4] |= _borders(0, 6, 13)
    return found


def _borders(*places: int) -> dict[str, Any]:
    borders = torch.tensor(places, dtype=torch.int32)
    longest = int(borders.diff().max())
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}


def tiny(family: str) -> Any:
    make: Any = build_with_experts if family in ("mixtral", "gpt_oss", "deepseek_v3") else build
    model: Any = make(family, **FAMILIES[family]).double().train()
    return with_flash(model, THREE if family in SINKS else TWO)


def train(plan: dict[str, Any] | None, family: str = "llama") -> dict[str, Tensor]:
    with Float64(), installed():
        found = functools.partial(batches, says_borders=plan is None)
        return train_whole(tiny(family), plan, found, training_logits=plan is None or "pp" not in plan)


@functools.cache
def reference(family: str) -> dict[str, Tensor]:
    return train(None, family)


@pytest.mark.parametrize(
    ("family", "plan_name"),
    crossings(
        product(FAMILIES, PLANS),
        but=[
            ("llama", "tp2+sp"),
            ("llama", "pp2"),
            ("gemma2", "cp2"),
            ("gemma2", "cp2, ulysses"),
            ("gemma2", "cp2, ring"),
        ],
    ),
)
def test_equals_one_process(family: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    plan = PLANS[plan_name]
    expected = reference(family)
    if "pp" in plan:
        expected = {name: x for name, x in expected.items() if not name.startswith("logits in training")}
    assert_equals_one_process(pool_for(plan, request).run(train, plan, family), expected)


@pytest.mark.parametrize(
    ("family", "plan_name"),
    crossings(product(("llama", "gemma2", "gpt_oss"), FOUR)),
)
def test_equals_one_process_on_four_ranks(family: str, plan_name: str, pool4: Any) -> None:
    assert_equals_one_process(pool4.run(train, FOUR[plan_name], family), reference(family))


def train_planted(plan: dict[str, Any], family: str, fault: str) -> dict[str, Tensor]:
    faults = {
        "no window": mock.patch.object(
            FlashCall, "blocks", lambda call, keys: causal_blocks(call.documents, call.runs, keys)
        ),
        "padding sees and is seen": mock.patch.object(ContextMask, "holes", None),
        "borders of documents are left out": mock.patch.object(FlashRows, "_documents", lambda *_: None),
        "the logarithm of a block alone": mock.patch.object(torch, "logaddexp", lambda before, new: new),
    }
    unchecked = mock.patch.object(flash, "is_right", lambda *_: True)  # this check finds some of them, too
    with faults[fault], unchecked, uncompared():
        return train(plan, family)


@pytest.mark.parametrize(
    ("family", "plan_name", "fault", "result"),
    [
        ("gemma2", "cp2", "no window", "loss 0"),
        ("llama", "cp2", "padding sees and is seen", "loss 1"),
        ("llama", "tp2+sp", "borders of documents are left out", "loss 3"),
        ("llama", "cp2, ring", "the logarithm of a block alone", "norm 0"),
    ],
)
def test_faults_are_caught(family: str, plan_name: str, fault: str, result: str, pool2: Any) -> None:
    expected = reference(family)
    found = pool2.run(train_planted, PLANS[plan_name], family, fault)
    actual = found[0]
    assert relative_difference(actual[result], expected[result]) > 1e-6


@pytest.mark.parametrize("window", [1, 3, 9, 30])
@pytest.mark.parametrize("documents", [((0,),), ((0, 5, 6, 12, 19),), ((0, 20), (0, 1, 13))])
@pytest.mark.parametrize("runs", [((0, 12), (12, 12)), ((0, 3), (3, 17), (20, 4)), ((6, 6), (18, 6))])
def test_blocks_hold_each_pair_of_a_window_once(window: int, documents: Documents, runs: Any) -> None:
    queries = tuple(TokenRun(*run) for run in runs)
    places = torch.cat([torch.arange(run.start, run.stop) for run in queries])
    every = (TokenRun(0, 6), TokenRun(6, 6), TokenRun(12, 12)) if len(runs) == 2 and runs[0][0] else queries
    keys = torch.cat([torch.arange(run.start, run.stop) for run in every])
    pairs = torch.zeros(2, len(places), len(keys), dtype=torch.int64)
    for block in causal_blocks(documents, queries, every, window):
        size = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
        reach = (-1, -1) if block.window is None else (block.window, -1)
        seen = ~hidden_pairs(*size, block.is_causal, reach)
        assert seen.any(1).all()  # a kernel's logarithm of nothing is not defined
        pairs[block.rows, block.queries, block.keys] += seen.long()
    numbers = torch.tensor([[sum(place >= s for s in row) for place in range(24)] for row in documents])
    distance = places[:, None] - keys
    seen = (numbers[:, places, None] == numbers[:, None, keys]) & (distance >= 0) & (distance < window)
    assert torch.equal(pairs, seen.long().expand_as(pairs))


def message_of(plan: dict[str, Any], family: str, batch: dict[str, Any], **traits: Any) -> str:
    with Float64(), installed():
        make: Any = build_with_experts if family in SINKS else build_with_traits if traits else build
        model: Any = with_flash(make(family, **traits).double().train(), TWO)
        with pytest.raises(PlanError) as error:
            model = mw.to_distributed(model, plan=mw.ParallelPlan(**plan))[0]
            model(**batch)
        return str(error.value)


def test_what_would_differ_is_refused(pool2: Any) -> None:
    rows = {"input_ids": tokens(2, 12), "labels": tokens(2, 12)}
    packed = rows | {"position_ids": _positions(5, 7).expand(2, -1)}
    jump = rows | {"position_ids": (torch.arange(12) + 4 * (torch.arange(12) > 4)).expand(2, -1)}
    mask = torch.ones(2, 12, dtype=torch.int64)
    holes = mask.clone()
    holes[0, 4] = 0
    cases: list[tuple[dict[str, Any], str, dict[str, Any], dict[str, Any], str]] = [
        (PLANS["tp2+sp"], "llama", packed | {"attention_mask": mask}, {}, "Leave attention_mask out"),
        (PLANS["tp2+sp"], "llama", jump, {}, "begin at 0"),
        (PLANS["cp2"], "llama", jump, {}, "begin at 0"),
        (PLANS["cp2"], "llama", rows | {"attention_mask": holes}, {}, "padding between the tokens"),
        (PLANS["cp2"], "llama", rows | _borders(0, 24), {}, "position_ids that begin anew"),
        (PLANS["pp2"], "llama", rows | _borders(0, 24), {}, "position_ids that begin anew"),
        (PLANS["cp2"], "gpt_oss", rows, {}, "another package"),
        (PLANS["cp2, ring"], "llama", rows, {"attention_dropout": 0.1}, "context='ulysses'"),
    ]
    for plan, family, batch, traits, cure in cases:
        for message in pool2.run(message_of, plan, family, batch, **traits):
            assert cure in message, message


def message_without_package(plan: dict[str, Any]) -> str:
    with pytest.raises(PlanError) as error:
        mw.to_distributed(with_flash(build("llama")), plan=mw.ParallelPlan(**plan))
    return str(error.value)


def test_a_missing_package_is_an_error_on_all_ranks(pool2: Any) -> None:
    for plan in (PLANS["tp2+sp"], PLANS["cp2"]):
        for message in pool2.run(message_without_package, plan):
            assert "pip install flash-attn" in message and "attn_implementation='sdpa'" in message


def test_borders_of_documents_do_not_reach_a_tower() -> None:
    """Qwen2-VL passes all options of a call on to its tower, which has borders of its own."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    rotary = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = {**sizes, "num_key_value_heads": 2, "vocab_size": 99, "rope_parameters": rotary}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=90)
    ids = tokens(2, 14).clamp(max=80)
    ids[:, 2:6] = 90
    rows = {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == 90, -100),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
    }
    with Float64(), installed():
        rows |= {"pixel_values": torch.randn(2, 16, 96), "position_ids": _positions(8, 6).expand(4, 2, -1)}
        alone: Any = with_flash(transformers.Qwen2VLForConditionalGeneration(config).double())
        row = [{n: x[:, i : i + 1] if n == "position_ids" else x[i : i + 1] for n, x in rows.items()} for i in (0, 1)]
        expected = [alone(**one | {"pixel_values": one["pixel_values"][0]}).loss.item() for one in row]
        model = mw.to_distributed(alone, plan=mw.ParallelPlan())[0]
        loss = model(**rows | {"pixel_values": rows["pixel_values"].flatten(0, 1)}).loss.item()
    assert loss == pytest.approx(sum(expected) / 2, rel=1e-12)  # float64: the rows have equally many labels


def test_a_kernel_with_other_numbers_is_refused() -> None:
    with installed():
        kernel = PackageKernel(TWO)
        assert is_right(torch.device("cpu"), torch.float32, kernel)
        wrong = mock.patch.object(PackageKernel, "forward", lambda self, call, block, q, *_: (q, q[..., 0]))
        is_right.cache_clear()
        with wrong:
            assert not is_right(torch.device("cpu"), torch.float32, kernel)
        is_right.cache_clear()
