"""Autocast in half precision by an Accelerator: the losses and the skipped steps are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright_hf.accelerate import prepare
from support.accelerated import accelerator, dataset
from support.models import build
from support.reference import make_optimizer
from support.tiers import crossing

TP2 = {"tp": 2}
PP2 = {"pp": 2, "gradient_accumulation_steps": 2}


def prepared(accelerate: Any, plan: dict[str, Any] | None) -> Any:
    """Return a model, its optimizer and 10 batches, under a plan or, stock, in one process."""
    model = build("llama")
    objects = (model, make_optimizer(model, lr=1e-3), DataLoader(dataset(40), batch_size=4))
    if plan is None:
        return accelerate.prepare(*objects)
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), gather_logits="pp" in plan)
    return prepare(accelerate, *objects, config=config)


def train_in_bf16(plan: dict[str, Any] | None) -> list[float]:
    with accelerator(mixed_precision="bf16") as accelerate:
        model, optimizer, loader = prepared(accelerate, plan)
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            accelerate.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("plan", [crossing({"tp": 2, "sequence_parallel": True}), PP2], ids=["tp2", "pp2"])
def test_bf16_autocast_trains_as_in_one_process(plan: dict[str, Any], pool2: Any) -> None:
    # 5e-3: bf16 has 8 bits, so that products are rounded by up to 4e-3, and other sums round in another place.
    losses, expected = pool2.run(train_in_bf16, plan)[0], train_in_bf16(None)
    assert losses == pytest.approx(expected, rel=5e-3)
    with accelerator():
        assert losses != pytest.approx(_train_in_float32(), rel=1e-7), "autocast was on"


def train_in_fp16(plan: dict[str, Any] | None) -> tuple[list[float], list[bool], float]:
    """Losses, which steps were skipped, and the last scale, with an overflow on the first rank in one step."""
    with accelerator(mixed_precision="fp16") as accelerate:
        accelerate.scaler, accelerate.native_amp = torch.amp.GradScaler("cpu", init_scale=256.0), True
        model, optimizer, loader = prepared(accelerate, plan)
        skipped: list[bool] = []
        is_here = accelerate.process_index == 0
        norm = model.model.layers[0].input_layernorm
        norm.weight.register_hook(lambda g: g * torch.inf if is_here and len(skipped) == 3 else g)
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            accelerate.backward(loss)
            accelerate.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            skipped.append(optimizer.step_was_skipped)
        return losses, skipped, accelerate.scaler.get_scale()


@pytest.mark.parametrize("plan", [TP2, crossing(PP2)], ids=["tp2", "pp2"])
def test_fp16_skips_the_steps_of_one_process(plan: dict[str, Any], pool2: Any) -> None:
    expected, *scaled = train_in_fp16(None)
    for losses, *found in pool2.run(train_in_fp16, plan):
        assert found == scaled == [[number == 3 for number in range(10)], 128.0]
        # 1e-3: fp16 has 11 bits, so that products are rounded by up to 5e-4.
        assert losses == pytest.approx(expected, rel=1e-3)


def _train_in_float32() -> list[float]:
    model = build("llama")
    optimizer, losses = make_optimizer(model, lr=1e-3), []
    for batch in DataLoader(dataset(40), batch_size=4):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
