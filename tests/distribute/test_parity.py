"""Every family under every plan equals one process: logits, losses, gradients, norms and weights.

Tolerance 1e-10 relative to a tensor's largest value: in float64 only the order of sums differs, about
1e-16 a sum, and five AdamW steps divide tiny differences by tiny moments (1e-12 measured at worst).
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.parallel.batch import mean_over_ranks as mean
from meshwright.parallel.gradients.buckets import Bucket
from support.models import FAMILIES
from support.parity import TOLERANCE, crossed, largest_differences, pool_for, reference
from support.reference import Result, train_family
from support.replicas import uncompared
from support.tiers import crossing, crossings

PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2": ({"tp": 2}, {}),
    "tp2+sp": ({"tp": 2, "sequence_parallel": True}, {}),
    "dp2": ({"dp": 2}, {}),
    "dp2+zero1": ({"dp": 2, "zero_stage": 1}, {}),
    "dp2xtp2+sp+zero1": ({"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1}, {}),
    "dp2xtp2+sp+zero3": ({"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 3}, {}),
    "tp4+sp, 2 kv heads": ({"tp": 4, "sequence_parallel": True}, {"num_key_value_heads": 2}),
}


@pytest.mark.parametrize(
    ("family", "plan_name"),
    crossings(
        crossed(FAMILIES, PLANS),
        but=[*(("llama", plan_name) for plan_name in PLANS), ("gemma2", "dp2xtp2+sp+zero3")],
        quick=[("llama", "tp2+sp"), ("llama", "dp2xtp2+sp+zero3"), ("qwen3", "dp2xtp2+sp+zero1")],
    ),
)
def test_equals_one_process_in_float64(family: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    plan, overrides = PLANS[plan_name]
    ranks = pool_for(plan, request).run(train_family, family, torch.float64, plan, **overrides)
    differences = largest_differences(ranks[0], reference(family, **overrides))
    assert max(differences.values()) <= TOLERANCE, differences
    # Every rank reports the same global loss and norm, to the bit.
    assert all(rank.losses == ranks[0].losses and rank.norms == ranks[0].norms for rank in ranks)


@pytest.mark.parametrize(
    ("family", "plan_name"),  # stage 3 is in test_zero.py
    crossings(crossed(["llama", "gemma2"], [name for name in PLANS if "zero3" not in name]), one_in=2),
)
def test_losses_equal_one_process_in_float32_over_20_steps(
    family: str, plan_name: str, request: pytest.FixtureRequest
) -> None:
    # 1e-5: float32 sums differ by about 1e-7, and 20 steps of training amplify that less than 100
    # times at a learning rate at which training is stable (at ten times this one, AdamW on models
    # so small turns the rounding of a single process into 1e-4).
    plan, overrides = PLANS[plan_name]
    options = {"steps": 20, "accumulation": 1, "lr": 1e-3, **overrides}
    ranks = pool_for(plan, request).run(train_family, family, torch.float32, plan, **options)
    assert largest_loss_difference(ranks[0], reference(family, torch.float32, **options)) <= 1e-5


def largest_loss_difference(actual: Result, expected: Result) -> float:
    return max(abs(a - b) / b for a, b in zip(actual.losses, expected.losses, strict=True))


@pytest.mark.parametrize("family", [crossing("qwen3"), "olmo2"])
def test_no_sync_gives_the_same_numbers(family: str, request: pytest.FixtureRequest) -> None:
    plan, _ = PLANS["dp2xtp2+sp+zero1"]
    ranks = pool_for(plan, request).run(train_family, family, torch.float64, plan, use_no_sync=True)
    differences = largest_differences(ranks[0], reference(family))
    assert max(differences.values()) <= TOLERANCE, differences


def run_without_summing_copies(
    family: str, plan: dict[str, Any], dtype: torch.dtype = torch.float64, **options: Any
) -> Result:
    """The classic mistake: each rank keeps its own part of the norms' gradients."""
    with mock.patch.object(Bucket, "average_copies", lambda *_: None), uncompared():
        return train_family(family, dtype, plan, **options)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_forgetting_to_sum_norm_gradients_would_be_caught(family: str, pool2: Any) -> None:
    # The wrong answer is off by more than 1e-2, a hundred million times the tolerance.
    ranks = pool2.run(run_without_summing_copies, family, {"tp": 2, "sequence_parallel": True})
    assert largest_differences(ranks[0], reference(family))["gradients"] > 1e-2


@pytest.mark.crossing
def test_losses_in_float32_would_show_it_too(pool2: Any) -> None:
    options = {"steps": 20, "accumulation": 1, "lr": 1e-3}
    ranks = pool2.run(
        run_without_summing_copies, "llama", {"tp": 2, "sequence_parallel": True}, torch.float32, **options
    )
    assert largest_loss_difference(ranks[0], reference("llama", torch.float32, **options)) > 1e-5


def run_with_mean_of_means(family: str) -> Result:
    """Another classic: each rank divides by its own count of tokens."""
    with mock.patch.object(mean, "all_gather", lambda x, axis: x.repeat(axis.size, 1)):
        return train_family(family, torch.float64, {"dp": 2})


@pytest.mark.quick
def test_a_mean_of_means_would_be_caught(pool2: Any) -> None:
    ranks = pool2.run(run_with_mean_of_means, "llama")
    differences = largest_differences(ranks[0], reference("llama"))
    assert differences["losses"] > 1e-3 and differences["gradients"] > 1e-3
