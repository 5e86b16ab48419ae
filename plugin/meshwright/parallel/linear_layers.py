"""Replaces the forward of a linear layer by that of its kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.parallel import saved_tensors as saved
from meshwright.parallel.method_chain import ChainStep, StepOrder
from meshwright.roles.linear_kernel import LinearKernel


class LinearForward(ChainStep):
    """The ``forward`` of a linear layer, which saves the layer's input itself instead of a copy in another dtype.

    Args:
        module: the layer.
        kernel: how the layer computes.
    """

    order = StepOrder.LATER_GRADIENT

    def __init__(self, module: nn.Module, kernel: LinearKernel):
        self.module, self.kernel = module, kernel

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.module._parameters.get("weight")  # none if a hook computes it, as prune's and weight_norm's do
        bias: Tensor | None = self.module._parameters.get("bias")
        if weight is None or not (torch.is_grad_enabled() and weight.requires_grad):
            result: Tensor = self.method(x)
            return result
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        # Not by save_for_backward: the part of a backward that needs only the weight would unpack the input too, and
        # under sequence parallelism gather it.
        take = partial(self.weight_gradient, weight, saved.keep(x))
        with torch.autocast(kind, enabled=False):
            return self.kernel.with_graph(x, weight, bias, take)

    def weight_gradient(
        self, weight: nn.Parameter, read_input: Callable[[], Tensor], gradient: Tensor
    ) -> Tensor | None:
        """Return the gradient of the weight from that of the output, or None if it is computed later."""
        return self.kernel.weight_gradient(read_input(), gradient).to(weight.dtype)
