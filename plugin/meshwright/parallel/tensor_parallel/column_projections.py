"""Runs the collectives of a block's input beside the matrix multiplications of its backward.

All projections of a block read the same input. Autograd would compute the gradients of a projection's input and of its
weight in one node, so backward would gather the input again, multiply, and then reduce the input's gradient. As in
Megatron, the runtime takes the weights' gradients apart. While the input is gathered, autograd computes the gradient of
the input, which does not depend on the input. While that gradient is reduced, the weights' gradients are computed::

    collective   all-gather  x  [S/tp, H] -> [S, H]      reduce-scatter  dx  [S, H] -> [S/tp, H]
    compute      dx = dy W   [S, F/tp] -> [S, H]         dW = dy^T x     [F/tp, H]
                 ───────────────────────────── time ─────────────────────────────>

To take the gradients apart, ``LinearForward`` replaces the forward of a linear layer by that of its kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.autograd import Node, TensorFunction
from meshwright.mesh.axes import Axis
from meshwright.parallel import saved_tensors as saved
from meshwright.parallel.collectives import (
    all_gather,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from meshwright.parallel.method_chain import ChainStep, StepOrder, add_step, find_chain, remove_step
from meshwright.roles.linear_kernel import LinearKernel, kernel_of


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


class ColumnProjections:
    """The linear projections that read one block's input.

    Between :meth:`enter` and :meth:`close`, the projections run on detached weights, and the autograd node of
    :meth:`enter` has the gradients of the weights.

    Args:
        modules: the projections.
        is_gathered: whether each rank passes its own tokens to the block (sequence parallelism), or all tokens.
    """

    def __init__(self, modules: Sequence[nn.Module], *, is_gathered: bool):
        self.is_gathered = is_gathered
        self.current: _ColumnPass | None = None
        modules = modules if all(map(kernel_of, modules)) else ()
        self.forwards = [_ColumnForward(module, i, self) for i, module in enumerate(modules)]

    def remove(self) -> None:
        """Give the projections their own forward, and leave all gradients to autograd."""
        for forward in self.forwards:
            forward.remove()
        self.forwards = []

    def can_enter(self, x: Tensor) -> bool:
        """Return whether the next pass can use :meth:`enter`; otherwise autograd computes all gradients."""
        if not (self.forwards and x.requires_grad and torch.is_grad_enabled()):
            return False
        for forward in self.forwards:
            if not forward.is_outermost or forward.module._parameters.get("weight") is None:
                return False
        return True

    def enter(self, x: Tensor, axis: Axis) -> Tensor:
        """Return the rows that the projections read, from this rank's rows or from all; :meth:`open` must follow."""
        weights = [forward.module._parameters["weight"] for forward in self.forwards]
        self.current = _ColumnPass(weights)
        return _EnterProjections.apply(x, axis, self.is_gathered, self.current, *weights)

    def open(self, full: Tensor) -> None:
        """Let the projections compute their outputs from ``full``, the result of :meth:`enter` in the block's shape."""
        assert self.current is not None
        self.current.full = full

    def close(self, *, has_ended: bool) -> None:
        """End the pass.

        Args:
            has_ended: whether the block has returned; otherwise it raised, as recomputation does when it has enough.
        """
        current, self.current = self.current, None
        # A weight that no projection read gets None from the node, which calls its hooks. Autograd would not call them.
        # A checkpointed block stays as it is: its recomputation must save what its forward saved.
        if current is not None and has_ended and current.unread and not saved.is_checkpointing():
            self.remove()


class _ColumnPass:
    """One forward pass through a block's projections.

    Args:
        weights: the projections' weights.

    Attributes:
        node: the autograd node that has the weights' gradients.
        unread: the indices of the weights that no projection has read.
    """

    def __init__(self, weights: list[nn.Parameter | None]):
        self.weights = weights
        self.is_checkpointing = saved.is_checkpointing()
        self.node: Node
        self.unread = set(range(len(weights)))
        self.full: Tensor | None = None

    def holds(self, x: Tensor) -> bool:
        """Return whether ``x`` is the block's input, in any shape."""
        full = self.full
        if x is full or full is None:
            return x is full
        return x.numel() == full.numel() and x.is_contiguous() and saved.memory(x) == saved.memory(full)


class _ColumnForward(LinearForward):
    """The ``forward`` of a projection; the node of the block's input computes the gradient of the weight."""

    order = StepOrder.COLUMN

    def __init__(self, module: nn.Module, index: int, group: ColumnProjections):
        super().__init__(module)
        self.index, self.group = index, group

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        current = self.group.current
        weight = self.module._parameters["weight"]
        is_entered = current is not None and weight is current.weights[self.index] and args and current.holds(args[0])
        # The program may checkpoint what is inside of the block: it then runs again without the block's entry.
        is_entered = is_entered and saved.is_checkpointing() == current.is_checkpointing  # type: ignore[union-attr]
        if current is None or weight is None or not is_entered or not torch.is_grad_enabled():
            result: Tensor = self.method(*args, **kwargs)
            return result
        current.unread.discard(self.index)
        y = self.kernel.with_graph(args[0], weight.detach(), self.module._parameters["bias"])
        if weight.requires_grad:
            y.register_hook(partial(_take, current.node, self.index, self.kernel))
        return y


class _EnterProjections(TensorFunction):
    """Gives a block's projections their input; backward reduces its gradient beside the weights' gradients."""

    @staticmethod
    def forward(ctx: Node, x: Tensor, axis: Axis, is_gathered: bool, current: _ColumnPass, *weights: Tensor) -> Tensor:
        full = all_gather(x, axis) if is_gathered else x.view_as(x)
        # Checkpointing drops what is saved and gathers it in its own forward.
        ctx.gathers = is_gathered and not saved.is_checkpointing()
        ctx.save_for_backward(x if ctx.gathers else full)
        ctx.axis, ctx.is_gathered, ctx.dtypes = axis, is_gathered, [weight.dtype for weight in weights]
        ctx.task, ctx.taken, ctx.regathered = -1, [], None
        ctx.set_materialize_grads(False)
        current.node = ctx
        return full

    @staticmethod
    def backward(ctx: Node, grad: Tensor | None) -> tuple[object, ...]:
        taken, regathered = ctx.taken, ctx.regathered
        ctx.task, ctx.taken, ctx.regathered = -1, [], None
        reduced = None if grad is None else _start_reduction(grad, ctx.axis, ctx.is_gathered)
        of_weights: list[Tensor | None] = [None] * len(ctx.dtypes)
        if taken:
            x = (ctx.saved_tensors[0] if regathered is None else regathered()).flatten(0, -2)
            for index, kernel, gradient in taken:
                rows = gradient.flatten(0, -2)
                read = x if x.shape[0] == rows.shape[0] else x[: rows.shape[0]]  # without the padding
                own = kernel.weight_gradient(read, rows).to(ctx.dtypes[index])
                before = of_weights[index]
                of_weights[index] = own if before is None else before + own
        return None if reduced is None else reduced(), None, None, None, *of_weights


def _start_reduction(grad: Tensor, axis: Axis, is_gathered: bool) -> Callable[[], Tensor]:
    if is_gathered:
        return start_reduce_scatter(grad, axis)
    # A copy, since the reduction is in place and autograd may pass the same tensor to another consumer.
    return start_all_reduce(grad.clone(memory_format=torch.contiguous_format), axis)


def _take(node: Node, index: int, kernel: LinearKernel, gradient: Tensor) -> None:
    """Keep the gradient of a projection's output for the block's node; the first of them starts to gather the input."""
    task = torch._C._current_graph_task_id()
    if node.task != task:
        if not torch._C._will_engine_execute_node(node):  # type: ignore[arg-type]
            return
        node.task, node.taken = task, []
        node.regathered = start_all_gather(node.saved_tensors[0], node.axis) if node.gathers else None
    node.taken.append((index, kernel, gradient))
