"""Single training steps with the inputs that real scripts have: padding, packing, odd lengths, ..."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from support.exact import Float64
from support.models import build, labels_for, tokens


def left_padded() -> dict[str, Tensor]:
    ids = tokens(4, 12)
    mask = torch.ones_like(ids)
    for row in range(4):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed() -> dict[str, Tensor]:
    ids = tokens(2, 12)
    positions = torch.tensor([[*range(5), *range(7)], [*range(8), *range(4)]])
    return {"input_ids": ids, "position_ids": positions, "labels": labels_for(ids)}


def shifted() -> dict[str, Any]:
    ids = tokens(2, 12)
    targets = labels_for(ids).roll(-1, 1)
    return {"input_ids": ids, "labels": ids, "shift_labels": targets}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"input_ids": tokens(4, 12), "labels": labels_for(tokens(4, 12))},
    "left padding": left_padded,
    "packed sequences": packed,
    "an odd length": lambda: {"input_ids": tokens(3, 11), "labels": labels_for(tokens(3, 11))},
    "one row, one target": lambda: {"input_ids": tokens(1, 2), "labels": tokens(1, 2)},
    "shift_labels": shifted,
    "num_items_in_batch": lambda: {
        "input_ids": tokens(4, 12),
        "labels": labels_for(tokens(4, 12)),
        "num_items_in_batch": torch.tensor(77),
    },
    "another ignore_index": lambda: {
        "input_ids": tokens(4, 12),
        "labels": labels_for(tokens(4, 12)).masked_fill(labels_for(tokens(4, 12)) == -100, 5),
        "ignore_index": 5,
    },
}


@dataclass
class Step:
    loss: float
    gradients: dict[str, Tensor]


def one_step(
    family: str,
    scenario: str,
    plan: dict[str, Any] | None = None,
    *,
    checkpointing: bool = False,
    dtype: torch.dtype = torch.float64,
    config: dict[str, Any] | None = None,
    **overrides: Any,
) -> Step:
    """Loss and whole gradients of one step; with a plan distributed, else stock in this process."""
    with Float64() if dtype is torch.float64 else contextlib.nullcontext():
        model = build(family, **overrides).to(dtype)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        batch = SCENARIOS[scenario]()
        if plan is None and scenario == "packed sequences":
            model.config.use_cache = False  # the stock model reads borders of documents without a cache only
        if plan is not None:
            options = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), **(config or {}))
            model, _, loader = mw.to_distributed(model, None, [batch], config=options)
            (batch,) = loader
        loss = model(**batch).loss
        loss.backward()
        if plan is None:
            return Step(loss.item(), {n: p.grad for n, p in model.named_parameters()})
        return Step(loss.item(), mw.full_gradients(model))
