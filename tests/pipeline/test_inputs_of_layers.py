"""Layers that get more than hidden states equal one process over stages: encoders' results, tables, second streams.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import meshwright as mw
from meshwright.pipeline.layer_order import record_order
from meshwright.roles import find_decoder
from support import encoder_models
from support.exact import Float64, relative_difference
from support.models import SIZES, labels_for, tokens
from support.parity import crossed, pool_for
from support.tiers import crossings
from support.whole_runs import assert_equals_one_process, differences, train_whole

LAYERS = 4
TP = {"tp": 2, "sequence_parallel": True}
PLANS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp2, gpipe, recompute": {"pp": 2, "schedule": "gpipe", "recompute": "full"},
    "pp2, interleaved": {"pp": 2, "schedule": "interleaved"},
    "pp2, zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "pp2, zbv": {"pp": 2, "schedule": "zbv"},
    "pp4, recompute": {"pp": 4, "recompute": "full"},
    "pp2 x dp2, interleaved": {"pp": 2, "dp": 2, "schedule": "interleaved"},
    "pp2 x dp2+zero1, zb-h1": {"pp": 2, "dp": 2, "zero_stage": 1, "schedule": "zb-h1"},
    "pp2 x tp2+sp, recompute": {"pp": 2, **TP, "recompute": "full"},
    "pp2 x tp2+sp, zbv": {"pp": 2, **TP, "schedule": "zbv"},
}
ENCODED = {"t5": "t5, translations", "bart, frozen encoder": "bart, translations", "whisper": "whisper, translations"}


def build(name: str) -> Any:
    """A model with four layers, and four of an encoder if it has one."""
    torch.manual_seed(0)
    if name in ENCODED:
        more = {key: LAYERS for key in ("num_decoder_layers", "decoder_layers")}
        model: Any = encoder_models.build(ENCODED[name], **more)
        if "frozen" in name:
            model.model.encoder.requires_grad_(False)
        return model
    sizes = {**SIZES, "num_hidden_layers": LAYERS}
    if name == "zaya":
        model = transformers.ZayaForCausalLM(transformers.ZayaConfig(**sizes))
    else:  # a frozen table of positions
        del sizes["num_key_value_heads"]
        model = transformers.RoFormerForCausalLM(transformers.RoFormerConfig(**sizes, is_decoder=True))
    return model.double().train()


def batches(name: str) -> list[dict[str, Tensor]]:
    """Rows that micro-batches do not divide, of several lengths, padded, and some without labels."""
    found = []
    for step, (rows, length, decoded) in enumerate([(4, 11, 6), (5, 8, 9), (4, 9, 9), (1, 10, 3)]):
        ids = tokens(rows, length, seed=step)
        mask = torch.ones_like(ids)
        for row in range(rows):
            mask[row, length - row :] = 0
        labels = labels_for(tokens(rows, decoded, seed=step + 9)) if name in ENCODED else labels_for(ids)
        labels[0, :2] = -100
        inputs = {"input_ids": ids, "attention_mask": mask}
        if name == "whisper":
            seed = torch.Generator().manual_seed(step)
            inputs = {"input_features": torch.randn(rows, 8, 128, dtype=torch.float64, generator=seed)}
        found.append({**inputs, "labels": labels})
    return found


def train(plan: dict[str, Any] | None, name: str) -> dict[str, Tensor]:
    options = None if plan is None else {"gradient_accumulation_steps": 2, **plan}
    with Float64():
        return train_whole(build(name), options, functools.partial(batches, name))


reference = functools.cache(functools.partial(train, None))
MODELS = [*ENCODED, "roformer"]
CASES = [case for case in crossed(MODELS, PLANS, every=2) if not (case[0] == "roformer" and "tp2" in case[1])]


@pytest.mark.parametrize(("name", "plan_name"), CASES)
def test_equals_one_process(name: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan_name], request).run(train, PLANS[plan_name], name)
    assert_equals_one_process(results, reference(name))
