"""What a quantiser would do to a model in its first forward pass is done before a plan places the weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import meshwright as mw
from support.models import build, tokens


class Compressor:
    """As that of compressed-tensors: it replaces compressed weights, with their scales, in the first forward pass."""

    def __init__(self, layer: nn.Linear):
        self.layer, self.whole = layer, layer.weight.detach().clone()
        layer.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
        layer.weight_scale = nn.Parameter(torch.ones(1))

    def decompress(self) -> None:
        self.layer.weight = nn.Parameter(self.whole)
        self.layer.weight_scale = nn.Parameter(torch.ones(1))


def compressed() -> Any:
    model: Any = build("llama")
    compressor = Compressor(model.model.layers[0].mlp.up_proj)

    def decompress(*_: object) -> None:
        compressor.decompress()
        handle.remove()

    handle = model.register_forward_pre_hook(decompress)
    model.hf_quantizer = SimpleNamespace(compressor=compressor, pre_quantized=True)
    return model


def losses(plan: str | None) -> list[float]:
    model = compressed()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    ids = tokens(4, 8)
    loader: Any = [{"input_ids": ids, "labels": ids}] * 2
    if plan is not None:
        model, optimizer, loader = mw.to_distributed(model, optimizer, loader, plan=plan)
    found = []
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_weights_are_decompressed_before_they_are_placed(pool2: Any) -> None:
    expected = losses(None)
    for got in pool2.run(losses, "dp2 zero1"):
        assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) < 1e-6  # float32
