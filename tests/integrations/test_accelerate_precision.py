"""Autocast in half precision by accelerate and the Trainer: losses and skipped steps are those of one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright_hf.accelerate import prepare
from support.accelerated import accelerator, dataset, losses_of
from support.models import build
from support.own_gradients import on_arrival
from support.reference import make_optimizer
from support.tiers import crossing
from support.trainers import Rows, arguments, fresh_accelerate, make_trainer

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
        return losses_of(accelerate, *prepared(accelerate, plan))


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
        on_arrival(norm.weight, lambda g: g * torch.inf if is_here and len(skipped) == 3 else g)
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


def trainer_in_fp16(folder: Path, plan: dict[str, Any] | None, max_grad_norm: float) -> tuple[list[Any], float]:
    """What a Trainer logs in four steps, and the last scale, with an overflow on the first rank in the second step."""
    with fresh_accelerate():
        args = arguments(
            folder,
            (plan or {}).get("dp", 1),
            max_steps=4,
            fp16=True,
            max_grad_norm=max_grad_norm,
            save_strategy="steps",
            save_steps=4,
        )
        trainer: Any = make_trainer(args, plan, data={"train_dataset": Rows(37)})
        accelerate = trainer.accelerator
        accelerate.scaler, accelerate.native_amp = torch.amp.GradScaler("cpu", init_scale=256.0), True
        is_here = accelerate.process_index == 0
        norm = trainer.model.model.layers[0].input_layernorm
        on_arrival(norm.weight, lambda g: g * torch.inf if is_here and trainer.state.global_step == 1 else g)
        trainer.train()
        logs = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        return logs, accelerate.scaler.get_scale()


@pytest.mark.parametrize("max_grad_norm", [crossing(0.5), 0.0], ids=["clipped", "not clipped"])
def test_fp16_in_the_trainer_logs_the_norms_of_one_process(max_grad_norm: float, pool2: Any, tmp_path: Path) -> None:
    """The norms are those of gradients without the scale, also if the Trainer does not clip."""
    expected, scale = trainer_in_fp16(tmp_path / "one", None, max_grad_norm)
    assert scale == 128.0 and [math.isfinite(norm) for _, norm in expected] == [True, False, True, True]
    for logs, found in pool2.run(trainer_in_fp16, tmp_path, TP2, max_grad_norm):
        assert found == scale
        for (loss, norm), (wanted, wanted_norm) in zip(logs, expected, strict=True):
            # As above; norms of small gradients keep fewer digits. A norm with the scale is 128 times as large.
            assert loss == pytest.approx(wanted, rel=1e-3)
            assert norm == pytest.approx(wanted_norm, rel=2e-2) or not (
                math.isfinite(norm) or math.isfinite(wanted_norm)
            )


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
