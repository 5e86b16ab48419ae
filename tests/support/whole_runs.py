"""A short training whose results are whole tensors, whatever holds their parts: layers or sequences over ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import meshwright as mw
from meshwright.layout.tensor_layout import TensorLayout
from support.exact import gradient_differences, relative_difference
from support.parity import TOLERANCE
from support.short_programs import gradients_of

Batches = Callable[[], list[dict[str, Tensor]]]


def with_adapters(model: Any) -> Any:
    """Adapters whose second factor is not zero, so that the gradient of the first is not zero either."""
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "o_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.double().train()


def train_whole(
    model: Any, plan: dict[str, Any] | None, batches: Batches, *, training_logits: bool = False, **options: Any
) -> dict[str, Tensor]:
    """Whole results of a few steps: accumulation windows of two batches, clipping, and an evaluation.

    Args:
        model: the model; what must not be trained is frozen.
        plan: None for one process.
        batches: makes the same batches at each call; the first call is trained on, the second is evaluated.
        training_logits: whether the logits of training are results, too.
        options: further fields of the configuration.
    """
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    data: Any = batches()
    if plan is None:
        model.config.use_cache = False  # the stock model finds the documents of a packed row only without a cache
    else:
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), gather_logits=True, **options)
        model, optimizer, data = mw.to_distributed(model, optimizer, data, config=config)
    has_all_rows = plan is None or plan.get("dp", 1) == 1
    found: dict[str, Tensor] = {}
    for step, batch in enumerate(data):
        output = model(**batch)
        (output.loss / 2).backward()
        found[f"loss {step}"] = output.loss.detach()
        if training_logits and has_all_rows:
            found[f"logits in training {step}"] = _real(batch, output.logits.detach())
        if step % 2 == 0:
            if step == 0:
                found |= {f"gradient of {name}": gradient for name, gradient in gradients_of(model, plan).items()}
            found[f"norm {step}"] = mw.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for step, batch in enumerate(batches()):
            output = model(**batch)
            if has_all_rows:
                found |= {f"evaluation {step}": output.loss, f"logits {step}": _real(batch, output.logits)}
    weights = model.state_dict() if plan is None else mw.full_state_dict(model)
    return found | {f"weight {name}": value.clone() for name, value in weights.items()}


def summed_over_tp() -> AbstractContextManager[object]:
    """A fault: the gradients of modules that each rank has whole are summed over tp."""
    whole = TensorLayout.whole
    return mock.patch.object(TensorLayout, "whole", lambda x, ranks=1, **_: whole(x, ranks, addends=frozenset(("tp",))))


def differences(results: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> dict[str, float]:
    """The relative difference of each result of rank 0; what every rank has must be equal on all ranks."""
    actual = results[0]
    left_out = {name for name in expected if name.startswith(("evaluation", "logits"))} - actual.keys()
    assert actual.keys() == expected.keys() - left_out
    everywhere = [name for name in actual if name.startswith(("loss", "norm", "evaluation"))]
    assert all(torch.equal(result[name], actual[name]) for result in results for name in everywhere)
    found = {name: relative_difference(actual[name], expected[name]) for name in actual}
    for kind in ("gradient of ", "weight "):  # the bias of keys has no gradient but rounding
        if names := [name for name in actual if name.startswith(kind)]:
            found |= gradient_differences({n: actual[n] for n in names}, {n: expected[n] for n in names})
    return found


def assert_equals_one_process(results: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    found = differences(results, expected)
    assert max(found.values()) <= TOLERANCE, max(found.items(), key=lambda item: item[1])


def _real(batch: dict[str, Tensor], logits: Tensor) -> Tensor:
    """The logits without those of padding, whose values mean nothing."""
    mask = batch.get("attention_mask")
    return logits if mask is None or mask.shape != logits.shape[:2] else logits[mask.bool()]
