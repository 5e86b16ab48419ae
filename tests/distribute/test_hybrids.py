"""Decoders with recurrences or convolutions over tokens equal one process, with mixers by heads or whole on each rank.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor

import meshwright as mw
from meshwright.distribute.decide import structure_of
from meshwright.parallel.tensor_parallel.structure import DecoderStructure
from support.exact import Float64
from support.hybrid_models import FAMILIES, build, loader
from support.parity import pool_for
from support.tiers import crossings
from support.whole_runs import assert_equals_one_process, differences, summed_over_tp, train_whole

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "tp2+sp, recompute": {"tp": 2, "sequence_parallel": True, "recompute": "full"},
    "dp2 x tp2+sp, zero3": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 3},
    "pp2": {"pp": 2},
    "pp2 x tp2+sp, micro-batches": {"pp": 2, "tp": 2, "sequence_parallel": True, "gradient_accumulation_steps": 2},
}
WHOLE = "delta net, 3 heads"
CASES = [(family, plan) for family in (*FAMILIES, WHOLE) for plan in PLANS]
IN_MAKE_TEST = [("qwen3_5_text", "tp2+sp"), ("falcon_h1", "tp2+sp, recompute"), (WHOLE, "tp2+sp")]


def train(plan: dict[str, Any] | None, family: str) -> dict[str, Tensor]:
    with Float64():
        return train_whole(build(family), plan, loader)


reference = functools.cache(functools.partial(train, None))


@pytest.mark.parametrize(
    ("family", "plan_name"),
    crossings(CASES, but=[("qwen3_5_text", "tp2+sp"), ("falcon_h1", "tp2+sp, recompute"), (WHOLE, "tp2+sp")]),
)
def test_equals_one_process(family: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan_name], request).run(train, PLANS[plan_name], family)
    assert_equals_one_process(results, reference(family))


def train_with_sums(plan: dict[str, Any], family: str) -> dict[str, Tensor]:
    """A fault: the gradients of modules that each rank has whole are summed over tp."""
    with summed_over_tp():
        return train(plan, family)


def test_summed_gradients_of_mixers_would_be_caught(pool2: Any) -> None:
    found = differences(pool2.run(train_with_sums, PLANS["tp2+sp"], WHOLE), reference(WHOLE))
    assert found["gradient of model.layers.0.linear_attn.in_proj_qkv.weight"] > 0.5
    assert found["norm 0"] > 1e-3


def test_mixers_whose_heads_cannot_be_shared_stay_whole() -> None:
    found = structure_of(build(WHOLE), mw.ParallelPlan(tp=2, sequence_parallel=True), mw.ToDistributedConfig())
    assert isinstance(found, DecoderStructure)
    assert sorted(found.whole) == ["model.layers.0.linear_attn", "model.layers.2.linear_attn"]
    for name, layout in found.parameters.items():
        if len(layout.shape) > 1:
            assert layout.is_sharded is not name.startswith(tuple(f"{whole}." for whole in found.whole)), name
