"""What scripts of transformers and accelerate do with an Accelerator, shortened to what a plan concerns."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import get_scheduler

from support.accelerated import dataset
from support.models import build
from support.reference import make_optimizer

ROWS = 4  # of all data-parallel ranks together


@dataclass
class Curve:
    """What a script logs at each optimizer step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def difference(self, other: Curve) -> float:
        """The largest one of any number, relative to the largest of its kind: a rate may end at 0."""
        worst = 0.0
        for name in ("losses", "norms", "rates"):
            pairs = list(zip(getattr(self, name), getattr(other, name), strict=True))
            assert len(pairs) > 1
            worst = max(worst, max(abs(a - b) for a, b in pairs) / max(abs(b) for _, b in pairs))
        return worst


def clm_no_trainer(
    accelerator: Accelerator,
    prepare: Callable[..., Any],
    *,
    dp: int,
    max_train_steps: int | None,
    num_warmup_steps: int = 2,
    num_train_epochs: int = 2,
    state: str | None = None,
    save_after: int = 0,
    completed: int = 0,
) -> Curve:
    """transformers' run_clm_no_trainer.py: the lengths of its schedule are times num_processes, or are not.

    With ``state`` it saves itself there after ``save_after`` steps, or goes on from there after ``completed``.
    """
    model = build("llama").double()
    optimizer = make_optimizer(model, lr=1e-3)
    train_dataloader: Any = DataLoader(dataset(32), batch_size=ROWS // dp)
    accumulation = accelerator.gradient_accumulation_steps
    overrode_max_train_steps = False
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / accumulation)
    if max_train_steps is None:
        max_train_steps = num_train_epochs * num_update_steps_per_epoch
        overrode_max_train_steps = True
    lr_scheduler = get_scheduler(
        name="linear",
        optimizer=optimizer,
        num_warmup_steps=num_warmup_steps * accelerator.num_processes,
        num_training_steps=max_train_steps if overrode_max_train_steps else max_train_steps * accelerator.num_processes,
    )
    model, optimizer, train_dataloader, lr_scheduler = prepare(model, optimizer, train_dataloader, lr_scheduler)
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / accumulation)
    if overrode_max_train_steps:
        max_train_steps = num_train_epochs * num_update_steps_per_epoch
    num_train_epochs = math.ceil(max_train_steps / num_update_steps_per_epoch)

    if completed:
        accelerator.load_state(state)
    curve, total_loss = Curve(), 0.0
    for _ in range(num_train_epochs):
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total_loss += loss.detach().item() / accumulation
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    curve.norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                curve.losses.append(total_loss)
                curve.rates.append(lr_scheduler.get_last_lr()[0])
                total_loss = 0.0
                if len(curve.rates) == save_after > 0:
                    accelerator.save_state(state)
            if completed + len(curve.rates) >= max_train_steps:
                return curve
    return curve


def accumulation_for_causal_lms(accelerator: Accelerator, prepare: Callable[..., Any], *, dp: int) -> Curve:
    """accelerate's gradient_accumulation_for_autoregressive_models.py: the count of a window, of all processes."""
    model = build("llama").double()
    optimizer = make_optimizer(model, lr=1e-3)
    lr_scheduler = get_scheduler("constant", optimizer=optimizer)
    loader: Any = DataLoader(dataset(36), batch_size=ROWS // dp)
    gradient_accumulation_steps = accelerator.gradient_accumulation_steps
    model, optimizer, train_dataloader, lr_scheduler = prepare(model, optimizer, loader, lr_scheduler)
    remainder = len(train_dataloader) % gradient_accumulation_steps or gradient_accumulation_steps
    total_gradient_updates = math.ceil(len(train_dataloader) / gradient_accumulation_steps)

    curve = Curve()
    for _ in range(2):
        training_iterator = iter(train_dataloader)
        for update_step in range(total_gradient_updates):
            is_last = update_step == total_gradient_updates - 1
            batch_samples = [
                next(training_iterator) for _ in range(remainder if is_last else gradient_accumulation_steps)
            ]
            local_num_items_in_batch = sum((batch["labels"].ne(-100)).sum() for batch in batch_samples)
            num_items_in_batch = accelerator.gather(local_num_items_in_batch).sum().item()
            losses: list[torch.Tensor] = []
            for i, batch in enumerate(batch_samples):
                is_inner = i < len(batch_samples) - 1 and accelerator.num_processes > 1
                with model.no_sync() if is_inner else contextlib.nullcontext():
                    loss = model(**batch, num_items_in_batch=num_items_in_batch).loss
                    loss = loss * gradient_accumulation_steps * accelerator.num_processes
                    accelerator.backward(loss)
                    losses.append(loss.detach())
            curve.norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            total = accelerator.gather(sum(losses)).sum().item()
            curve.losses.append(total / (accelerator.num_processes * gradient_accumulation_steps))
            curve.rates.append(lr_scheduler.get_last_lr()[0])
    return curve
