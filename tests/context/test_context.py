"""Training with every sequence spread over cp equals one process: each method, with tp, sp, dp, ZeRO and adapters.

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

from meshwright.context import masks
from meshwright.parallel import sequence_parts
from meshwright.parallel.sequence_parts import SequenceParts
from support.exact import Float64
from support.models import build, labels_for, tokens
from support.parity import crossed, pool_for
from support.replicas import uncompared
from support.tiers import crossings
from support.whole_runs import assert_equals_one_process, differences, train_whole, with_adapters

TOLERANCE = 1e-10
TP = {"tp": 2, "sequence_parallel": True}
HYBRID = {"cp": 4, "context": "hybrid", "ulysses": 2}

PLANS: dict[str, dict[str, Any]] = {
    "cp2": {"cp": 2},
    "cp2, ulysses": {"cp": 2, "context": "ulysses"},
    "cp2, ring": {"cp": 2, "context": "ring"},
    "cp4, gather": {"cp": 4},
    "cp4, ulysses": {"cp": 4, "context": "ulysses"},
    "cp4, ring": {"cp": 4, "context": "ring"},
    "cp4, hybrid": HYBRID,
    "cp2 x tp2": {"cp": 2, "tp": 2, "context": "ulysses"},
    "cp2 x tp2+sp, gather": {"cp": 2, **TP},
    "cp2 x tp2+sp, ring, micro-batches": {"cp": 2, **TP, "context": "ring", "micro_batch_size": 2},
    "cp2 x tp2+sp, ulysses, recompute": {"cp": 2, **TP, "context": "ulysses", "recompute": "full"},
    "cp2 x dp2": {"cp": 2, "dp": 2, "context": "ring"},
    "cp2 x dp2+zero1, recompute": {"cp": 2, "dp": 2, "zero_stage": 1, "recompute": "full"},
    "cp2 x dp2+zero2, ulysses": {"cp": 2, "dp": 2, "zero_stage": 2, "context": "ulysses", "micro_batch_size": 1},
    "cp2 x dp2+zero3, ring": {"cp": 2, "dp": 2, "zero_stage": 3, "context": "ring"},
    "cp2+zero1": {"cp": 2, "zero_stage": 1},
    "cp2+zero3, micro-batches": {"cp": 2, "zero_stage": 3, "gradient_accumulation_steps": 2},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral, window": ("mistral", {"num_key_value_heads": 8}),
    "gemma2, tied": ("gemma2", {}),
    "qwen3, one key head": ("qwen3", {"num_key_value_heads": 1}),
}


def batches() -> list[dict[str, Tensor]]:
    """Lengths that 2 cp does not divide, one shorter than 2 cp, rows without labels, packed documents, and padding."""
    found = []
    for step, (rows, length) in enumerate([(4, 11), (5, 8), (4, 19), (6, 12), (1, 3)]):
        ids = tokens(rows, length, seed=step)
        found.append({"input_ids": ids, "labels": labels_for(ids)})
    found[1]["labels"][:3] = -100  # the first micro-batch has no label that counts
    found[2]["position_ids"] = torch.cat([torch.arange(4), torch.arange(2), torch.arange(13)]).expand(4, -1)
    mask = torch.ones(6, 12, dtype=torch.int64)
    mask[1, -3:] = mask[4, :2] = 0
    found[3] |= {"attention_mask": mask, "labels": found[3]["labels"].masked_fill(mask == 0, -100)}
    return found


@mock.patch.object(sequence_parts, "_SMALLEST", 1)  # so that the ranks share the short packed row by its work, too
@mock.patch.object(masks, "_SHORTEST", 1)  # and its documents run in kernels of their own
def train(plan: dict[str, Any] | None, model_name: str = "llama", *, adapters: bool = False) -> dict[str, Tensor]:
    """Whole results of a few steps in which a layer is frozen."""
    family, traits = MODELS[model_name]
    with Float64():
        model: Any = build(family, **traits).double().train()
        model.model.layers[1].mlp.requires_grad_(False)
        return train_whole(with_adapters(model) if adapters else model, plan, batches, training_logits=True)


@functools.cache
def reference(model_name: str, *, adapters: bool = False) -> dict[str, Tensor]:
    return train(None, model_name, adapters=adapters)


@pytest.mark.parametrize(
    ("model_name", "plan_name"),
    crossings(
        [*crossed(MODELS, PLANS, every=4), ("gemma2, tied", "cp4, ring")],
        but=[
            ("llama", "cp4, gather"),
            ("llama", "cp4, ulysses"),
            ("llama", "cp4, ring"),
            ("llama", "cp4, hybrid"),
            ("llama", "cp2 x tp2+sp, ring, micro-batches"),
            ("llama", "cp2 x tp2+sp, ulysses, recompute"),
            ("llama", "cp2 x dp2+zero1, recompute"),
            ("llama", "cp2 x dp2+zero3, ring"),
            ("llama", "cp2+zero3, micro-batches"),
            ("mistral, window", "cp2 x tp2+sp, gather"),
            ("mistral, window", "cp4, ulysses"),
            ("qwen3, one key head", "cp4, hybrid"),
        ],
        quick=[("gemma2, tied", "cp4, ring")],
    ),
)
def test_equals_one_process(model_name: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan_name], request).run(train, PLANS[plan_name], model_name)
    assert_equals_one_process(results, reference(model_name))


@pytest.mark.parametrize("plan_name", ["cp2 x tp2+sp, gather", "cp2 x dp2+zero1, recompute"])
def test_adapters_equal_one_process(plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan_name], request).run(train, PLANS[plan_name], adapters=True)
    assert max(differences(results, reference("llama", adapters=True)).values()) <= TOLERANCE


def train_with_labels_of_other_tokens() -> dict[str, Tensor]:
    """What a cut before the shift gives: the last token of each part has no label."""
    take = SequenceParts.take

    def wrong(self: SequenceParts, x: Tensor, dim: int, fill: float = 0) -> Tensor:
        own = take(self, x, dim, fill)
        if fill == -100:
            own = own.clone()
            own[:, -1] = -100
        return own

    with mock.patch.object(SequenceParts, "take", wrong), uncompared():
        return train(PLANS["cp2"])


def test_cutting_before_the_shift_would_be_caught(pool2: Any) -> None:
    assert differences(pool2.run(train_with_labels_of_other_tokens), reference("llama"))["loss 0"] > 1e-3
