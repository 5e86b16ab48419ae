"""Parameters that are frozen and thawed while a program trains, as gradual unfreezing does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from support.exact import Float64
from support.models import build
from support.short_programs import Plan, batches, distribute, weights_of, worst
from support.tiers import crossing, crossings

ZERO = [{"dp": 2, "zero_stage": stage} for stage in (1, 2, 3)]
SP = {"tp": 2, "sequence_parallel": True}
STEPS = 6


def only(*parts: str) -> Callable[[str], bool]:
    return lambda name: any(part in name for part in parts)


# At which step the names that pass are trained, and all others frozen.
SCHEDULE = {
    0: only("lm_head", "norm"),
    2: only("layers.1", "lm_head"),
    3: lambda name: True,
    4: only("layers.0.mlp", "layers.1.self_attn.k_proj", "lm_head"),
    5: only("layers.0", "embed"),
}


def unfreeze_gradually(
    plan: Plan, accumulation: int = 1, use_no_sync: bool = False, set_to_none: bool = True, dtype: str = "float64"
) -> dict[str, Tensor]:
    """One optimizer over everything from the start, with a group for each kind of decay."""
    with Float64() if dtype == "float64" else contextlib.nullcontext():
        model = build("llama").to(getattr(torch, dtype))
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0, "lr": 2e-2},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        set_trained(model, SCHEDULE[0])
        model, optimizer, loader = distribute(plan, model, optimizer, batches(STEPS * accumulation))
        for i, batch in enumerate(loader):
            step, part = divmod(i, accumulation)
            if part == 0 and step in SCHEDULE:
                set_trained(model, SCHEDULE[step])
            is_last = part == accumulation - 1
            with mw.no_sync(model) if use_no_sync and plan and not is_last else contextlib.nullcontext():
                (model(**batch).loss / accumulation).backward()
            if is_last:
                mw.clip_grad_norm_(model, 0.5)
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
    return weights_of(model, plan)


@functools.cache
def reference(accumulation: int = 1, set_to_none: bool = True) -> dict[str, Tensor]:
    return unfreeze_gradually(None, accumulation, False, set_to_none)


def set_trained(model: nn.Module, is_trained: Callable[[str], bool]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name))


PLANS = [
    crossing({"dp": 2}),
    crossing({"tp": 2}),
    SP,
    *crossings(ZERO, but=[ZERO[1]]),
    crossing({"dp": 2, "gradient_accumulation_steps": 2}),
    {"dp": 2, "gradient_accumulation_steps": 2, "zero_stage": 1},
    {"dp": 2, "micro_batch_size": 1, "zero_stage": 3},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_gradual_unfreezing(plan: dict[str, Any], pool2: Any) -> None:
    """Row 5. 1e-9 in float64: the plans differ in the order of sums only; what is never stepped is off by 1e-1."""
    assert worst(pool2.run(unfreeze_gradually, plan)[0], reference()) < 1e-9


@pytest.mark.parametrize("plan", [crossing({"dp": 2}), crossing(ZERO[0]), *ZERO[1:]], ids=str)
def test_gradual_unfreezing_with_accumulation_and_zeros(plan: dict[str, Any], pool2: Any) -> None:
    """Rows 5 and 29: gradients that are zeroed and not dropped go on as zeros, so AdamW moves frozen parameters."""
    expected = reference(2, False)
    assert worst(expected, reference(2)) > 1e-3
    for use_no_sync in (False, True):
        assert worst(pool2.run(unfreeze_gradually, plan, 2, use_no_sync, False)[0], expected) < 1e-9


@pytest.mark.quick
def test_four_ranks(pool4: Any) -> None:
    """Row 5, with weights that are shards over tp and parts over dp."""
    plan = {"dp": 2, **SP, "zero_stage": 3}
    assert worst(pool4.run(unfreeze_gradually, plan)[0], reference()) < 1e-9
