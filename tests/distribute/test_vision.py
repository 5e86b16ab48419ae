"""Models that see images equal one process under every axis, with any number of images in each row.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor

from support.exact import Float64
from support.parity import pool_for
from support.tiers import crossings
from support.vision_models import FAMILIES, build, loader
from support.whole_runs import assert_equals_one_process, differences, summed_over_tp, train_whole

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "dp2 x tp2+sp, zero1": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1},
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "pp2 x tp2+sp": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "cp2": {"cp": 2},
    "cp2 x tp2+sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
}
# Refused by name: masks that let the tokens of an image see those that follow.
CASES = [(f, p) for f in FAMILIES for p in PLANS if "cp2" not in p or f not in ("gemma3", "paligemma")]


def train(plan: dict[str, Any] | None, family: str, *, freezes_tower: bool = False) -> dict[str, Tensor]:
    with Float64():
        return train_whole(build(family, freezes_tower=freezes_tower), plan, functools.partial(loader, family))


reference = functools.cache(functools.partial(train, None))


@pytest.mark.parametrize(
    ("family", "plan_name"), crossings(CASES, but=[("gemma3", "tp2+sp"), ("qwen3_vl", "tp2+sp"), ("qwen3_vl", "cp2")])
)
def test_equals_one_process(family: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan_name], request).run(train, PLANS[plan_name], family)
    assert_equals_one_process(results, reference(family))


def train_with_sums(plan: dict[str, Any], family: str) -> dict[str, Tensor]:
    """A fault: the gradients of a tower, which each rank has whole, are summed over tp."""
    with summed_over_tp():
        return train(plan, family)


def test_summed_gradients_of_a_tower_would_be_caught(pool2: Any) -> None:
    found = differences(pool2.run(train_with_sums, PLANS["tp2+sp"], "llava"), reference("llava"))
    towers = [x for name, x in found.items() if name.startswith("gradient of model.vision_tower")]
    assert towers and min(towers) > 0.5
    assert found["norm 0"] > 1e-3


def train_frozen(plan: dict[str, Any] | None) -> dict[str, Tensor]:
    return train(plan, "internvl", freezes_tower=True)


def test_a_frozen_tower(pool2: Any) -> None:
    results = pool2.run(train_frozen, PLANS["tp2+sp"])
    assert not any(name.startswith("gradient of model.vision_tower") for name in results[0])
    assert_equals_one_process(results, train_frozen(None))
