"""Train a few steps in one process with stock torch and transformers, or under a plan."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import meshwright as mw
from support.exact import Float64
from support.models import build, labels_for, tokens
from support.short_programs import distribute, gradients_of, weights_of

ROWS, LENGTH, STEPS, ACCUMULATION = 4, 12, 5, 2


@dataclass
class Result:
    """What a run leaves for comparison; everything one-device and whole."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first_logits: Tensor | None = None
    first_gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def dataset(batches: int = STEPS * ACCUMULATION) -> list[dict[str, Tensor]]:
    ids = tokens(ROWS * batches, LENGTH)
    labels = labels_for(ids)
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(len(ids))]


def make_optimizer(
    model: torch.nn.Module, kind: type = torch.optim.AdamW, *, lr: float = 1e-2, **options: Any
) -> torch.optim.Optimizer:
    """Two groups, decayed and not, as everybody's scripts have."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return kind(groups, lr=lr, **options)


def train_family(
    family: str,
    dtype: torch.dtype,
    plan: dict[str, Any] | None,
    *,
    steps: int = STEPS,
    accumulation: int = ACCUMULATION,
    lr: float = 1e-2,
    use_no_sync: bool = False,
    **overrides: Any,
) -> Result:
    """Train with global batches: with stock everything in one process, or with one call added under a plan.

    Returns:
        Whole tensors on rank 0, losses and norms on every rank.
    """
    mode = Float64() if dtype is torch.float64 else contextlib.nullcontext()
    result = Result()
    with mode:
        model = build(family, **overrides).to(dtype)
        optimizer = make_optimizer(model, lr=lr)
        loader = DataLoader(dataset(steps * accumulation), batch_size=ROWS)
        gathers = plan is not None and plan.get("pp", 1) > 1
        model, optimizer, loader = distribute(plan, model, optimizer, loader, gather_logits=gathers)
        result.first_logits = _logits(model)
        for i, batch in enumerate(loader):
            is_last = i % accumulation == accumulation - 1
            with mw.no_sync(model) if use_no_sync and not is_last else contextlib.nullcontext():
                loss = model(**batch).loss
                (loss / accumulation).backward()
            result.losses.append(loss.item())
            if is_last:
                if not result.norms:
                    result.first_gradients = gradients_of(model, plan)
                result.norms.append(mw.clip_grad_norm_(model, 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
        result.weights = weights_of(model, plan)
    return result


def _logits(model: torch.nn.Module) -> Tensor:
    """Logits in evaluation, where they are whole."""
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens(2, LENGTH, seed=7)).logits.clone()
    model.train()
    return logits
