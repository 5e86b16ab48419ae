"""Train through a DeepSpeed engine, for comparison with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from meshwright_hf.deepspeed import full_state_dict, initialize
from support.models import build
from support.reference import ACCUMULATION, ROWS, Result, dataset, make_optimizer

TRAITS = {"attention_bias": True}  # with Qwen3's head norms: every kind of partial gradient there is


def config_for(stage: int, **changes: Any) -> dict[str, Any]:
    """A user's JSON; no parameter is small enough to stay whole, as it would be in a real model."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **changes.pop("zero_optimization", {})}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "zero_optimization": zero,
        **changes,
    }


def train(engine: Any, batches: Any) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for batch in batches:
        loss = engine(**batch).loss
        engine.backward(loss)
        is_last = engine.is_gradient_accumulation_boundary()
        engine.step()
        losses.append(loss.item())
        if is_last:
            norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def run_engine(plan: dict[str, Any], stage: int, *, steps: int, lr: float, family: str = "qwen3", zero=None, **overrides: Any) -> Result:
    model = build(family, **{**TRAITS, **overrides})
    optimizer = make_optimizer(model, lr=lr)
    loader = torch.utils.data.DataLoader(dataset(steps * ACCUMULATION), batch_size=ROWS)
    engine, _, loader, _ = initialize(
        model=model, optimizer=optimizer, dataloader=loader, config=config_for(stage, zero_optimization=zero or {}), plan=mw.ParallelPlan(**plan)
    )
    losses, norms = train(engine, loader)
    result = Result(losses=losses, norms=norms)
    result.weights = full_state_dict(engine)
    return result
