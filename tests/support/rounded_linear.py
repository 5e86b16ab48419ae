"""A kind of linear layer of its own, as fp8's are: its matrix multiplications read rounded tensors.

Rounding is to a grid, element by element, so that shards round as the whole tensor does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.roles.linear_kernel import LinearKernel, register_linear

RAN: list[
    str
] = []  # the gradients that were computed: by the kernel of the input or weight, or by the layer's own node


def rounded(x: Tensor) -> Tensor:
    return (x * 64).round() / 64


class RoundedLinear(nn.Linear):
    """A linear layer whose forward autograd cannot differentiate."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _OwnProduct.apply(x, self.weight, self.bias)
        return result


class _OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        own = rounded(x), rounded(weight)
        ctx.save_for_backward(*own)
        return F.linear(*own, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        RAN.append("own")
        x, weight = ctx.saved_tensors
        of_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        return gradient @ weight, of_weight, gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None


class RoundedKernel(LinearKernel):
    """What :class:`RoundedLinear` computes, in three parts."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
        y = F.linear(rounded(x), rounded(weight), bias)
        return y if out is None else out.copy_(y)

    def input_gradient(self, gradient: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        RAN.append("input")
        return torch.matmul(gradient, rounded(weight), out=out)

    def weight_gradient(self, x: Tensor, gradient: Tensor, *, total: Tensor | None = None) -> Tensor:
        RAN.append("weight")
        own = gradient.flatten(0, -2).t() @ rounded(x).flatten(0, -2)
        return own if total is None else total.add_(own)


def with_rounded_linears(model: nn.Module) -> nn.Module:
    """Give all linear layers of a model the class, and register its kernel."""
    register_linear(RoundedLinear, RoundedKernel())
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = RoundedLinear
    return model
