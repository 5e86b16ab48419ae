"""Compute the gradients of linear weights apart from the gradients of inputs, for zero-bubble schedules.

The backward of a zero-bubble schedule has two parts. The first computes the gradient of the stage's input, which the
stage before waits for. The second computes the weights' gradients, which nobody waits for. A linear layer keeps its
input and the gradient of its output from the first part to the second. Everything else of the graph is freed in the
first part. The first part also computes the gradients of norms, biases and embeddings, since they are small.
(autograd's own way, ``retain_graph=True``, keeps all activations until the second part and runs Python functions
twice.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.parallel import saved_tensors as saved
from meshwright.parallel.linear_layers import is_stock_linear, weight_factors, weight_gradient
from meshwright.parallel.method_chain import ChainStep, StepOrder, add_step
from meshwright.parallel.summed_gradients import SummedGradients
from meshwright.plan.schedule import Kind, Operation
from meshwright.roles.projection import is_transposed

# A weight, the layer's input, the gradient of its output, and whether the weight is transposed.
_Waiting = tuple[nn.Parameter, Callable[[], Tensor], Tensor, bool]


class WeightGradients:
    """The gradients of linear weights that wait for the second part of their backward.

    Args:
        modules: the modules whose linear layers get another ``forward``; empty for a schedule whose backward has one
            part.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self._waiting: dict[tuple[int, int], list[_Waiting]] = {}
        self._now: list[_Waiting] | None = None
        for module in modules:
            if is_stock_linear(module):
                add_step(module, _LinearForward(module, self))

    @contextlib.contextmanager
    def waiting(self, operation: Operation) -> Iterator[None]:
        """Keep the gradients of linear weights for later inside the context, if the operation is of the input alone."""
        if operation.kind is Kind.INPUT_GRAD:
            self._now = self._waiting[operation.stage, operation.micro_batch] = []
        try:
            yield
        finally:
            self._now = None

    @property
    def is_open(self) -> bool:
        """Whether the gradients of linear weights are to wait now."""
        return self._now is not None

    def wait(self, entry: _Waiting) -> None:
        """Keep one weight's gradient for later."""
        assert self._now is not None
        self._now.append(entry)

    def add_to(self, sums: SummedGradients, stage: int, micro_batch: int) -> None:
        """Compute the gradients that wait for a stage and a micro-batch, and add them to the sums."""
        # A stage before which all is frozen has run no backward, so nothing waits.
        for weight, read_input, gradient, transposed in self._waiting.pop((stage, micro_batch), ()):
            sums.add_product(weight, *weight_factors(read_input(), gradient, transposed))


class _LinearForward(ChainStep):
    """The ``forward`` of a linear layer whose weight's gradient may be computed later than its input's."""

    order = StepOrder.LATER_GRADIENT

    def __init__(self, module: nn.Module, later: WeightGradients):
        self.module, self.later = module, later

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
        with torch.autocast(kind, enabled=False):
            result = _Linear.apply(x, weight, bias, is_transposed(self.module), self.later)
        return result


class _Linear(torch.autograd.Function):
    """A linear layer that computes its weight's gradient now, or keeps what the gradient needs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, transposed: bool, later: WeightGradients
    ) -> Tensor:
        # Not by save_for_backward: the part that needs only the weight would unpack the input too, and under
        # sequence parallelism gather it.
        ctx.read_input = saved.keep(x)
        ctx.save_for_backward(weight)
        ctx.parameter, ctx.transposed, ctx.later, ctx.dtype = weight, transposed, later, x.dtype
        own = weight.to(x.dtype)
        return F.linear(x, own.t() if transposed else own, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        (weight,) = ctx.saved_tensors
        own = weight.to(ctx.dtype)
        of_input = grad @ (own.t() if ctx.transposed else own) if needs_input else None
        of_weight = None
        if needs_weight and ctx.later.is_open:
            ctx.later.wait((ctx.parameter, ctx.read_input, grad, ctx.transposed))
        elif needs_weight:
            of_weight = weight_gradient(ctx.read_input(), grad, ctx.transposed).to(weight.dtype)
        of_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        return of_input, of_weight, of_bias, None, None
