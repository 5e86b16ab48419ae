"""Recurrences and convolutions over tokens equal one process where ranks of cp share the sequence.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import meshwright as mw
from meshwright.context.handed_states import GatheredTokens
from meshwright.distribute.decide import structure_of
from meshwright.parallel.sequence_parts import SequenceParts
from support.exact import Float64
from support.hybrid_models import FAMILIES, build, loader
from support.models import labels_for, tokens
from support.parity import pool_for
from support.tiers import crossing, crossings
from support.whole_runs import assert_equals_one_process, differences, train_whole

PLANS: dict[str, dict[str, Any]] = {
    "cp2": {"cp": 2},
    "cp2(ring), recompute, micro-batches": {
        "cp": 2, "context": "ring", "recompute": "full", "gradient_accumulation_steps": 2,
    },
    "tp2 cp2": {"tp": 2, "cp": 2},
    "tp2+sp cp2": {"tp": 2, "sequence_parallel": True, "cp": 2},
    "dp2 cp2 zero3": {"dp": 2, "cp": 2, "zero_stage": 3},
    "pp2 cp2, micro-batches": {"pp": 2, "cp": 2, "gradient_accumulation_steps": 2},
    "cp4(ulysses)": {"cp": 4, "context": "ulysses"},
}  # fmt: skip
CASES = [
    *((family, plan) for family in FAMILIES for plan in PLANS),
    *(("delta net, rows by one key head", plan) for plan in ("cp2", "tp2+sp cp2")),
    *((name, "cp2") for name in ("nemotron_h", "delta attention")),
]
ROWS = ("whole rows", "padding", "three tokens")


def batches(kind: str) -> Any:
    """Rows of 11 tokens, with padding on either side, or of fewer tokens than a convolution has."""
    if kind == "whole rows":
        return loader()
    found = []
    for seed in range(3):
        ids = tokens(4, 3 if kind == "three tokens" else 11, seed=seed)
        mask = torch.ones_like(ids)
        if kind == "padding":
            mask[1, -4:] = mask[2, :2] = mask[3, 8:] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels_for(ids).masked_fill(mask == 0, -100)})
        found[-1]["labels"][:, -1] = ids[:, -1].masked_fill(mask[:, -1] == 0, -100)
    return found


def train(plan: dict[str, Any] | None, family: str, kind: str = "whole rows") -> dict[str, Tensor]:
    with Float64():
        return train_whole(build(family), plan, functools.partial(batches, kind))


reference = functools.cache(functools.partial(train, None))


@pytest.mark.parametrize(
    ("family", "plan_name"), crossings(CASES, but=[("qwen3_5_text", "cp2"), ("falcon_h1", "tp2+sp cp2")])
)
def test_equals_one_process(family: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan_name], request).run(train, PLANS[plan_name], family)
    assert_equals_one_process(results, reference(family))


@pytest.mark.parametrize(
    ("family", "kind"),
    crossings([(family, kind) for family in FAMILIES for kind in ROWS[1:]], but=[("lfm2", "padding")]),
)
def test_padded_and_short_rows_equal_one_process(family: str, kind: str, pool2: Any) -> None:
    assert_equals_one_process(pool2.run(train, PLANS["cp2"], family, kind), reference(family, kind))


def train_with_a_fault(plan: dict[str, Any], family: str, fault: str) -> dict[str, Tensor]:
    """Faults: tokens in the order of the ranks; gradients of tokens that are not summed; gradients counted twice."""

    def in_order_of_ranks(self: SequenceParts, x: Tensor, dim: int) -> Tensor:
        held = [numbers for rank in self.chunks_of for numbers in rank]
        chunks = gather(self, x, dim).chunk(len(held), dim)
        return torch.cat([chunks[number] for number in held], dim)

    def unsummed(self: SequenceParts, x: Tensor, dim: int) -> Tensor:
        return self.join(x, dim, x.shape[dim] * self.axis.size, is_taken_again=True)

    def twice(self: GatheredTokens, *args: Any, **kwargs: Any) -> Any:
        return tree_map_only(Tensor, lambda x: 2 * x - x.detach(), call(self, *args, **kwargs))

    gather, call = SequenceParts.gather, GatheredTokens.__call__
    faults: dict[str, Any] = {"order": in_order_of_ranks, "unsummed": unsummed, "twice": twice}
    owner, name = (GatheredTokens, "__call__") if fault == "twice" else (SequenceParts, "gather")
    with mock.patch.object(owner, name, faults[fault]):
        return train(plan, family)


@pytest.mark.parametrize(
    ("fault", "result", "family"),
    [
        ("order", "loss 0", "lfm2"),
        ("unsummed", "norm 0", "lfm2"),
        crossing("order", "loss 0", "recurrent_gemma"),
        crossing("unsummed", "norm 0", "recurrent_gemma"),
        ("twice", "norm 0", "recurrent_gemma"),
    ],
)
def test_a_planted_fault_is_found(fault: str, result: str, family: str, pool2: Any) -> None:
    """Of a mixer that hands its states over, and of one that gathers all tokens."""
    found = differences(pool2.run(train_with_a_fault, PLANS["cp2"], family, fault), reference(family))
    assert found[result] > 1e-6


def test_an_attention_with_a_convolution_is_refused() -> None:
    model = build("lfm2")
    model.model.layers[0].conv.is_causal = True  # the mark of an attention
    with pytest.raises(
        mw.PlanError, match=r"layers.0.conv \(Lfm2ShortConv\).*inside of an attention.*Use ParallelPlan"
    ):
        structure_of(model, mw.ParallelPlan(cp=2), mw.ToDistributedConfig())
