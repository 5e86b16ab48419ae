"""Replaces the forward of a linear layer by that of its kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.parallel import saved_tensors as saved
from meshwright.parallel.method_chain import ChainStep, StepOrder, add_step, find_chain, remove_step
from meshwright.roles.linear_kernel import kernel_of


class LinearForward(ChainStep):
    """The ``forward`` of a linear layer, which saves the layer's input itself instead of a copy in another dtype.

    Args:
        module: the layer, which has a kernel; the step is added to its forward.
    """

    order = StepOrder.KERNEL

    def __init__(self, module: nn.Module):
        kernel = kernel_of(module)
        assert kernel is not None
        self.module, self.kernel = module, kernel
        self._chain = add_step(module, self)

    def remove(self) -> None:
        """Give the layer its forward from before."""
        remove_step(self.module, self)

    @property
    def is_outermost(self) -> bool:
        """Whether nothing has replaced the layer's forward, and no step is around this one."""
        return find_chain(self.module) is self._chain and self._chain.first is self

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.module._parameters.get("weight")  # none if a hook computes it, as prune's and weight_norm's do
        if weight is None or not (torch.is_grad_enabled() and weight.requires_grad):
            result: Tensor = self.method(x)
            return result
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        # Not by save_for_backward: the part of a backward that needs only the weight would unpack the input too, and
        # under sequence parallelism gather it.
        take = partial(self.weight_gradient, weight, saved.keep(x))
        return self.kernel.with_graph(x, weight, self.module._parameters.get("bias"), take)

    def weight_gradient(
        self, weight: nn.Parameter, read_input: Callable[[], Tensor], gradient: Tensor
    ) -> Tensor | None:
        """Return the gradient of the weight from that of the output, or None if it is computed later."""
        return self.kernel.weight_gradient(read_input(), gradient).to(weight.dtype)
