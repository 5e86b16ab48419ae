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
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from meshwright.parallel.gradients.summed import SummedGradients
from meshwright.parallel.method_chain import StepOrder
from meshwright.parallel.tensor_parallel.linear_layers import LinearForward
from meshwright.plan.schedule import Kind, Operation
from meshwright.roles.linear_kernel import LinearKernel, kernel_of
from meshwright.temporarily import temporarily

# A weight, the kernel of its layer, the layer's input, and the gradient of its output.
_Waiting = tuple[nn.Parameter, LinearKernel, Callable[[], Tensor], Tensor]


class WeightGradients:
    """The gradients of linear weights that wait for the second part of their backward.

    Args:
        modules: the modules whose linear layers get another ``forward``; empty for a schedule whose backward has one
            part.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self._waiting: dict[tuple[int, int], list[_Waiting]] = {}
        self.now: list[_Waiting] | None = None  # those of the running backward, if they are to wait
        for module in modules:
            if kernel_of(module) is not None:
                _DelayedLinear(module, self)

    def waiting(self, operation: Operation) -> contextlib.AbstractContextManager[None]:
        """Keep the gradients of linear weights for later inside the context, if the operation is of the input alone."""
        if operation.kind is not Kind.INPUT_GRAD:
            return contextlib.nullcontext()
        now = self._waiting[operation.stage, operation.micro_batch] = []
        return temporarily(self, now=now)

    def add_to(self, sums: SummedGradients, stage: int, micro_batch: int) -> None:
        """Compute the gradients that wait for a stage and a micro-batch, and add them to the sums."""
        # A stage before which all is frozen has run no backward, so nothing waits.
        for weight, kernel, read_input, gradient in self._waiting.pop((stage, micro_batch), ()):
            sums.add_linear(weight, kernel, read_input(), gradient)


class _DelayedLinear(LinearForward):
    """The ``forward`` of a linear layer whose weight's gradient may be computed later than its input's."""

    order = StepOrder.LATER_GRADIENT

    def __init__(self, module: nn.Module, later: WeightGradients):
        super().__init__(module)
        self.later = later

    def weight_gradient(
        self, weight: nn.Parameter, read_input: Callable[[], Tensor], gradient: Tensor
    ) -> Tensor | None:
        if self.later.now is None:
            return super().weight_gradient(weight, read_input, gradient)
        self.later.now.append((weight, self.kernel, read_input, gradient))
        return None
