"""Train a few steps in one process with stock torch and transformers, and with meshwright."""

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


def run_reference(
    family: str,
    dtype: torch.dtype,
    *,
    steps: int = STEPS,
    accumulation: int = ACCUMULATION,
    lr: float = 1e-2,
    **overrides: Any,
) -> Result:
    """One process, stock everything, global batches."""
    mode = Float64() if dtype is torch.float64 else contextlib.nullcontext()
    result = Result()
    with mode:
        model = build(family, **overrides).to(dtype)
        optimizer = make_optimizer(model, lr=lr)
        loader = DataLoader(dataset(steps * accumulation), batch_size=ROWS)
        result.first_logits = _logits(model)
        for i, batch in enumerate(loader):
            loss = model(**batch).loss
            (loss / accumulation).backward()
            result.losses.append(loss.item())
            if i % accumulation == accumulation - 1:
                if not result.norms:
                    result.first_gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
                result.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
        result.weights = {n: w.clone() for n, w in model.state_dict().items()}
    return result


def run_distributed(
    family: str,
    dtype: torch.dtype,
    plan: dict[str, Any],
    *,
    steps: int = STEPS,
    accumulation: int = ACCUMULATION,
    lr: float = 1e-2,
    use_no_sync: bool = False,
    **overrides: Any,
) -> Result:
    """The same program with one call added; whole tensors on rank 0, losses on every rank."""
    mode = Float64() if dtype is torch.float64 else contextlib.nullcontext()
    result = Result()
    with mode:
        model = build(family, **overrides).to(dtype)
        optimizer = make_optimizer(model, lr=lr)
        loader = DataLoader(dataset(steps * accumulation), batch_size=ROWS)
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), gather_logits=plan.get("pp", 1) > 1)
        model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=config)
        result.first_logits = _logits(model)
        for i, batch in enumerate(loader):
            is_last = i % accumulation == accumulation - 1
            with mw.no_sync(model) if use_no_sync and not is_last else contextlib.nullcontext():
                loss = model(**batch).loss
                (loss / accumulation).backward()
            result.losses.append(loss.item())
            if is_last:
                if not result.norms:
                    result.first_gradients = mw.full_gradients(model)
                result.norms.append(mw.clip_grad_norm_(model, 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
        result.weights = mw.full_state_dict(model)
    return result


def _logits(model: torch.nn.Module) -> Tensor:
    """Logits in evaluation, where they are whole."""
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens(2, LENGTH, seed=7)).logits.clone()
    model.train()
    return logits
