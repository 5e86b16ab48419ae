"""Training over pipeline stages equals one process: every schedule, with tp, sp, dp, cp, ZeRO, ties and adapters.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments (3e-11 measured at worst).
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import meshwright as mw
from meshwright.pipeline.pipeline_forward import PipelineForward
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.replicas import uncompared

TOLERANCE = 1e-10
LAYERS = 8
TP = {"tp": 2, "sequence_parallel": True}

# Every schedule with its stages on 2 and on 4 ranks, and every other axis with some schedule.
PLANS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp2, gpipe": {"pp": 2, "schedule": "gpipe"},
    "pp2, interleaved": {"pp": 2, "schedule": "interleaved"},
    "pp2, zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "pp2, zbv": {"pp": 2, "schedule": "zbv"},
    "pp4, interleaved": {"pp": 4, "schedule": "interleaved", "gradient_accumulation_steps": 4},
    "pp4, zbv": {"pp": 4, "schedule": "zbv", "gradient_accumulation_steps": 3},
    "pp4, uneven stages, recompute": {"pp": 4, "stages": (1, 3, 2, 2), "recompute": "full"},
    "pp2 x tp2, zbv": {"pp": 2, "tp": 2, "schedule": "zbv"},
    "pp2 x tp2+sp, interleaved": {"pp": 2, **TP, "schedule": "interleaved"},
    "pp2 x tp2+sp, zb-h1": {"pp": 2, **TP, "schedule": "zb-h1"},
    "pp2 x tp2+sp, recompute": {"pp": 2, **TP, "recompute": "full"},
    "pp2 x dp2+zero1, zb-h1": {"pp": 2, "dp": 2, "zero_stage": 1, "schedule": "zb-h1"},
    "pp2 x dp2, interleaved": {"pp": 2, "dp": 2, "schedule": "interleaved"},
    "pp2 x cp2": {"pp": 2, "cp": 2},
    "pp2 x cp2, gather, zbv": {"pp": 2, "cp": 2, "schedule": "zbv"},
    "pp2 x cp2, gather, recompute": {"pp": 2, "cp": 2, "recompute": "full"},
    "pp2 x cp2, ulysses, gpipe": {"pp": 2, "cp": 2, "context": "ulysses", "schedule": "gpipe"},
    "pp2 x cp2+zero1, ulysses, zb-h1": {"pp": 2, "cp": 2, "context": "ulysses", "zero_stage": 1, "schedule": "zb-h1"},
    "pp2 x cp2, ring, interleaved": {"pp": 2, "cp": 2, "context": "ring", "schedule": "interleaved"},
    "pp2 x cp2+zero1, ring, recompute": {"pp": 2, "cp": 2, "context": "ring", "zero_stage": 1, "recompute": "full"},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma2, tied": ("gemma2", {}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
}


def batches() -> list[dict[str, Tensor]]:
    """Rows that micro-batches do not divide, odd lengths, rows without labels, packed documents, and padding."""
    found = []
    for step, (rows, length) in enumerate([(4, 11), (5, 8), (4, 9), (6, 12), (1, 10)]):
        ids = tokens(rows, length, seed=step)
        found.append({"input_ids": ids, "labels": labels_for(ids)})
    found[1]["labels"][:3] = -100  # the first micro-batch has no label that counts
    found[2]["position_ids"] = torch.cat([torch.arange(4), torch.arange(5)]).expand(4, -1)
    mask = torch.ones(6, 12, dtype=torch.int64)
    mask[1, -3:] = mask[4, :2] = 0
    found[3] |= {"attention_mask": mask, "labels": found[3]["labels"].masked_fill(mask == 0, -100)}
    return found


def train(plan: dict[str, Any] | None, model_name: str = "llama", *, adapters: bool = False) -> dict[str, Tensor]:
    """Whole results of a few steps: an accumulation window of two batches, clipping, evaluation, a frozen layer."""
    family, traits = MODELS[model_name]
    with Float64():
        model: Any = build(family, num_hidden_layers=LAYERS, **traits).double().train()
        model.model.layers[1].requires_grad_(False)
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
            options = {"gradient_accumulation_steps": 2, **plan}
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**options), gather_logits=True)
            model, optimizer, data = mw.to_distributed(model, optimizer, data, config=config)
        found: dict[str, Tensor] = {}
        for step, batch in enumerate(data):
            loss = model(**batch).loss
            (loss / 2).backward()
            found[f"loss {step}"] = loss.detach()
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


ADAPTED = ["pp2 x tp2+sp, zb-h1", "pp2 x dp2+zero1, zb-h1", "pp2 x cp2+zero1, ulysses, zb-h1"]


@pytest.mark.parametrize("plan_name", ADAPTED)
def test_adapters_equal_one_process(plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_of(PLANS[plan_name], request).run(train, PLANS[plan_name], adapters=True)
    assert max(differences(results, "llama", adapters=True).values()) <= TOLERANCE


def train_without_sum_of_ties() -> dict[str, Tensor]:
    with mock.patch.object(PipelineForward, "_sum_ties", lambda *_: None), uncompared():
        return train(PLANS["pp2"], "qwen3, tied")


def test_forgetting_to_sum_a_tied_weight_would_be_caught(pool2: Any) -> None:
    found = differences(pool2.run(train_without_sum_of_ties), "qwen3, tied")
    assert found["gradient of model.embed_tokens.weight"] > 1e-3
