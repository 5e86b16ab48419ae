"""Models with recurrences but no convolution over tokens equal one process; the recurrent modules stay whole.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from support.exact import Float64, relative_difference
from support.hybrid_models import RECURRENCES, build, loader
from support.models import tokens
from support.parity import pool_for
from support.tiers import crossings
from support.whole_runs import assert_equals_one_process, train_whole

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "cp2, recompute": {"cp": 2, "recompute": "full"},
    "dp2 zero3": {"dp": 2, "zero_stage": 3},
    "pp2, micro-batches": {"pp": 2, "gradient_accumulation_steps": 2},
}
CASES = [(family, plan) for family in RECURRENCES for plan in PLANS]


def train(plan: dict[str, Any] | None, family: str) -> dict[str, Tensor]:
    with Float64():
        return train_whole(build(family), plan, loader)


reference = functools.cache(functools.partial(train, None))


@pytest.mark.parametrize(("family", "plan_name"), crossings(CASES, but=[("rwkv", "tp2+sp")]))
def test_equals_one_process(family: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan_name], request).run(train, PLANS[plan_name], family)
    assert_equals_one_process(results, reference(family))


@pytest.mark.parametrize("family", RECURRENCES)
def test_packed_documents_equal_separate_ones(family: str) -> None:
    ids = tokens(2, 12)
    positions = torch.tensor([[*range(5), *range(7)], [*range(2), *range(10)]])
    model = build(family).eval()
    model.config.use_cache = False
    with Float64(), torch.no_grad():
        pieces = [(row, part) for row, first in ((0, 5), (1, 2)) for part in (slice(first), slice(first, 12))]
        separate = torch.cat([model(input_ids=ids[row : row + 1, part]).logits[0] for row, part in pieces])
        mw.to_distributed(model, plan=mw.ParallelPlan())
        packed = model(input_ids=ids, position_ids=positions).logits.flatten(0, 1)
    assert relative_difference(packed, separate) < 1e-10
