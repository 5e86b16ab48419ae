"""Models whose attention is FlexAttention equal one process with it, under cp, tp with sp, and pp.

torch computes it by its plain formula in float64 (``support/flex_kernel.py``). Tolerance 1e-10 of a tensor's largest
value: only the order of sums differs, about 1e-16 a sum, and AdamW divides tiny differences by tiny moments.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from conformance.families.models import build
from meshwright.context.masks import ContextMask
from meshwright.parallel.sequence_parts import TokenRun
from support.exact import Float64, relative_difference
from support.flex_kernel import plain_formula
from support.models import labels_for, tokens
from support.parity import pool_for
from support.tiers import crossings
from support.whole_runs import assert_equals_one_process, train_whole

PLANS: dict[str, dict[str, Any]] = {
    "gather": {"cp": 2},
    "ulysses": {"cp": 2, "context": "ulysses"},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
}
FAMILIES = ("llama", "gemma2")  # with a window and a soft cap in gemma2, and fewer heads of keys than of queries


def batches() -> list[dict[str, Tensor]]:
    """Rows of one document and of an odd length, padded rows, and rows of several documents."""
    found = []
    for step, (rows, length) in enumerate([(4, 11), (4, 12), (2, 16)]):
        ids = tokens(rows, length, seed=step)
        found.append({"input_ids": ids, "labels": labels_for(ids)})
    mask = torch.ones(4, 12, dtype=torch.int64)
    mask[1, -3:] = mask[2, :2] = 0
    found[1] |= {"attention_mask": mask, "labels": found[1]["labels"].masked_fill(mask == 0, -100)}
    lengths = ((5, 11), (1, 9, 6))
    found[2]["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return found


def train(plan: dict[str, Any] | None, family: str) -> dict[str, Tensor]:
    with Float64(), plain_formula():
        model = build(family, attn_implementation="flex_attention").double().train()
        return train_whole(model, plan, batches)


def train_planted(plan: dict[str, Any], family: str) -> dict[str, Tensor]:
    """The same with masks that count each block from its own start."""
    from meshwright.context import attend

    own = attend.block_mask

    def from_zero(mask: ContextMask, queries: TokenRun, keys: TokenRun) -> Any:
        return own(mask, TokenRun(0, queries.size), TokenRun(0, keys.size))

    with mock.patch.object(attend, "block_mask", from_zero):
        return train(plan, family)


@functools.cache
def reference(family: str) -> dict[str, Tensor]:
    return train(None, family)


@pytest.mark.parametrize(
    ("family", "method"), crossings(product(FAMILIES, PLANS), but=[("gemma2", method) for method in PLANS])
)
def test_equals_one_process(family: str, method: str, request: pytest.FixtureRequest) -> None:
    plan = PLANS[method]
    assert_equals_one_process(pool_for(plan, request).run(train, plan, family), reference(family))


def test_a_mask_that_counts_from_the_block_is_caught(pool2: Any) -> None:
    found = pool2.run(train_planted, PLANS["gather"], "llama")[0]
    assert relative_difference(found["loss 0"], reference("llama")["loss 0"]) > 1e-6
