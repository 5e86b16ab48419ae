"""Adapters on a frozen base and other optimizers in the planner, against a traced step of the runtime with PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import meshwright as mw
from meshwright.planner.adapters import Lora
from meshwright.planner.footprint import footprint
from meshwright.planner.shapes import describe
from meshwright.tracing.trace import trace_step
from planner.test_planner_footprint import FAMILIES, LENGTH, PLANS, ROWS, candidate, config_of
from support.tiers import crossings

RANK = 8
CASES = [(family, plan, torch.bfloat16) for family in ("llama", "gemma2", "phi3") for plan in PLANS if plan in (
    "one", "tp2", "tp2+sp+recompute", "dp2+zero1", "dp2+zero2+micro", "dp2xtp2+sp+zero3"
)]  # fmt: skip
CASES += [("llama", plan, torch.float32) for plan in ("one", "tp2", "tp2+sp+recompute", "dp2+zero1")]


def adapted(family: str, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        model = FAMILIES[family][1](config_of(family)).to(dtype).train()
        return get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"))


@pytest.mark.parametrize(
    ("family", "plan", "dtype"),
    crossings(CASES, but=[("llama", "tp2", torch.bfloat16), ("llama", "dp2xtp2+sp+zero3", torch.bfloat16)]),
)
def test_estimate_and_trace(family: str, plan: str, dtype: torch.dtype) -> None:
    """The weights, the state and the peak within 5 %; the estimate for training all weights misses the state by far."""
    model = adapted(family, dtype)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shape, lora, spread = describe(config_of(family)), Lora(rank=RANK), candidate(plan)
    assert sum(run.count * lora.elements(run) for run in shape.runs) == trained
    trace = trace_step(model, mw.ParallelPlan(**PLANS[plan]), rows=ROWS, length=LENGTH)
    sizes = {"seq_len": LENGTH, "element_bytes": dtype.itemsize, "cpu": True}
    held = footprint(shape, spread, lora=lora, **sizes)
    if spread.accumulation == 1:
        assert held.activations == pytest.approx(trace.activations, rel=0.03)
    assert held.parameters == pytest.approx(trace.parameters, rel=0.005)
    assert held.optimizer == pytest.approx(trace.optimizer, rel=0.002)
    assert held.peak == pytest.approx(trace.peak, rel=0.05)
    assert footprint(shape, spread, **sizes).optimizer > 10 * trace.optimizer
