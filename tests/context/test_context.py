"""Training with every sequence spread over cp equals one process: each method, with tp, sp, dp, ZeRO and adapters.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import meshwright as mw
from meshwright.parallel import sequence_parts
from meshwright.parallel.sequence_parts import SequenceParts
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.replicas import uncompared

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
def train(plan: dict[str, Any] | None, model_name: str = "llama", *, adapters: bool = False) -> dict[str, Tensor]:
    """Whole results of a few steps: an accumulation window of two batches, clipping, evaluation, a frozen layer."""
    family, traits = MODELS[model_name]
    with Float64():
        model: Any = build(family, **traits).double().train()
        model.model.layers[1].mlp.requires_grad_(False)
        if adapters:
            torch.manual_seed(3)
            model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "o_proj", "down_proj"]))
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.1)
            model = model.double().train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
        data: Any = batches()
        if plan is None:
            model.config.use_cache = False  # the stock model finds the documents of a packed row only without a cache
        else:
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), gather_logits=True)
            model, optimizer, data = mw.to_distributed(model, optimizer, data, config=config)
        found: dict[str, Tensor] = {}
        for step, batch in enumerate(data):
            output = model(**batch)
            (output.loss / 2).backward()
            found[f"loss {step}"] = output.loss.detach()
            if plan is None or plan.get("dp", 1) == 1:
                found[f"logits in training {step}"] = real(batch, output.logits.detach())
            if step % 2 == 0:
                if step == 0:
                    found |= {f"gradient of {name}": g for name, g in gradients(model, plan).items()}
                found[f"norm {step}"] = mw.clip_grad_norm_(model, 0.5)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for step, batch in enumerate(batches()):
                output = model(**batch)
                if plan is None or plan.get("dp", 1) == 1:
                    found |= {f"evaluation {step}": output.loss, f"logits {step}": real(batch, output.logits)}
        weights = model.state_dict() if plan is None else mw.full_state_dict(model)
        return found | {f"weight {name}": value.clone() for name, value in weights.items()}


def real(batch: dict[str, Tensor], logits: Tensor) -> Tensor:
    """The logits without those of padding, whose values mean nothing."""
    mask = batch.get("attention_mask")
    return logits if mask is None else logits[mask.bool()]


def gradients(model: Any, plan: dict[str, Any] | None) -> dict[str, Tensor]:
    if plan is not None:
        return mw.full_gradients(model)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


_references: dict[tuple[str, bool], dict[str, Tensor]] = {}


def differences(results: list[dict[str, Tensor]], model_name: str, *, adapters: bool = False) -> dict[str, float]:
    key = model_name, adapters
    if key not in _references:
        _references[key] = train(None, model_name, adapters=adapters)
    expected, actual = _references[key], results[0]
    left_out = {name for name in expected if name.startswith(("evaluation", "logits"))} - actual.keys()
    assert actual.keys() == expected.keys() - left_out
    everywhere = [name for name in actual if name.startswith(("loss", "norm", "evaluation"))]
    assert all(torch.equal(result[name], actual[name]) for result in results for name in everywhere)
    return {name: relative_difference(actual[name], expected[name]) for name in actual}


def pool_of(plan: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"pool{mw.ParallelPlan(**plan).world_size}")


@pytest.mark.parametrize("plan_name", PLANS)
@pytest.mark.parametrize("model_name", MODELS)
def test_equals_one_process(model_name: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_of(PLANS[plan_name], request).run(train, PLANS[plan_name], model_name)
    found = differences(results, model_name)
    assert max(found.values()) <= TOLERANCE, max(found.items(), key=lambda item: item[1])


@pytest.mark.parametrize("plan_name", ["cp2 x tp2+sp, gather", "cp2 x dp2+zero1, recompute"])
def test_adapters_equal_one_process(plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_of(PLANS[plan_name], request).run(train, PLANS[plan_name], adapters=True)
    assert max(differences(results, "llama", adapters=True).values()) <= TOLERANCE


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
    assert differences(pool2.run(train_with_labels_of_other_tokens), "llama")["loss 0"] > 1e-3
