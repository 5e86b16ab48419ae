"""Frozen bases whose modules keep packed integers in buffers, as those of GPTQ and AWQ do.

Plans that keep modules whole train on them as one device does. tp would have to cut what the library packed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.tiers import crossings


class PackedLinear(nn.Module):
    """A projection in 8 bits with a scale for each row, without parameters."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scales", scales)
        self.register_buffer("qweight", (linear.weight.detach() / scales).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.qweight.to(x.dtype) * self.scales)


def train(plan: str | None) -> dict[str, Tensor]:
    """Gradients of a step and weights after three, of what is not packed."""
    with Float64():
        model: Any = build("llama").double()
        for layer in model.model.layers:
            layer.mlp.down_proj = PackedLinear(layer.mlp.down_proj)
        model.is_quantized, model.quantization_method = True, "gptq"
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches: Any = [{"input_ids": x, "labels": labels_for(x)} for x in (tokens(4, 11, seed=s) for s in range(3))]
        if plan is not None:
            model, optimizer, batches = mw.to_distributed(model, optimizer, batches, plan=plan)
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return mw.full_state_dict(model)


@pytest.mark.parametrize("plan", crossings(["dp2 zero1", "dp2 zero3", "pp2", "cp2"], but=["dp2 zero3"]))
def test_training_equals_one_process(plan: str, pool2: Any) -> None:
    expected, actual = train(None), pool2.run(train, plan)[0]
    assert actual.keys() == expected.keys()
    for name, value in expected.items():  # 1e-10 in float64: the order of sums
        assert "k_proj.bias" in name or relative_difference(actual[name], value) < 1e-10, name


@pytest.mark.parametrize("plan", ["tp2", "tp2+sp"])
def test_tp_is_refused_by_name(plan: str, pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(train, plan):
        assert kind == "PlanError" and "quantised (gptq)" in message and "plan='dp2'" in message, message
