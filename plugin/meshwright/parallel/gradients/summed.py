"""Gradients that are computed inside ``model(**batch)`` and reach the parameters in the backward of its loss.

While backward runs, sum the gradients of rows that several ranks hold, before an engine reads them.

The runtime's own synchroniser averages the copies of a whole bucket at a time (see sync.py). That is too late
for an engine that takes each gradient as soon as it arrives, as DeepSpeed's ZeRO does to partition it.

The scale of a GradScaler, for backward passes that begin before the program can multiply the loss by it.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from meshwright.autograd import Node, TensorFunction, keeps_graph, refuse_second_order
from meshwright.facts import Facts
from meshwright.layout.tensor_layout import TensorLayout, layout_of
from meshwright.mesh.axes import Axis
from meshwright.parallel.async_numbers import is_known_one
from meshwright.parallel.collectives import all_reduce
from meshwright.parallel.gradients.program_hooks import ProgramHooks
from meshwright.parallel.gradients.sync import GradientSync
from meshwright.parallel.shards.sharded_parameter import show_elsewhere
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.roles.linear_kernel import LinearKernel

TWICE = (
    "backward ran a second time through a batch that the plan splits into micro-batches, but the first backward "
    "used up the gradients that were computed inside the model's forward. Call the model again before each backward, "
    "or write loss.backward(retain_graph=True) for all but the last"
)

UNSPLIT = "Set ParallelPlan(gradient_accumulation_steps=1, micro_batch_size=None, pp=1)"  # in place of micro-batches


class SummedGradients:
    """The sum of several micro-batches' whole, unreduced gradients.

    Args:
        parameters: the parameters that get the gradients.
        syncs: the model's synchronisers, which see only the sum.

    Attributes:
        elsewhere: the parameters that only other stages of a pipeline have, and what returns whether these have a
            gradient of each.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], syncs: Sequence[GradientSync]):
        self.parameters = list(parameters)
        self.elsewhere: Sequence[tuple[nn.Parameter, Callable[[], bool]]] = ()
        self.syncs = syncs
        self._sums: dict[int, Tensor] = {}
        self._storages: set[int] = set()  # memory of the sums

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Let gradients be computed inside the context without hooks and without reductions."""
        with contextlib.ExitStack() as stack:
            for sync in self.syncs:
                stack.enter_context(sync.paused())
            stack.enter_context(_without_hooks(self.parameters))
            yield

    def gradients_of(self, loss: Tensor) -> list[Tensor | None]:
        """Return the gradient of each parameter, by a whole backward pass; reentrant checkpoints refuse another."""
        with self.computing(), reading_shards():
            before = [parameter.grad for parameter in self.parameters]
            try:
                for parameter in self.parameters:
                    parameter.grad = None
                loss.backward()
                return [parameter.grad for parameter in self.parameters]
            finally:
                for parameter, gradient in zip(self.parameters, before, strict=True):
                    parameter.grad = gradient

    def add(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], *, used: Sequence[Tensor] = ()
    ) -> None:
        """Add a gradient of each parameter. None adds nothing. The tensors may be changed from now on.

        Args:
            parameters: the parameters.
            gradients: the gradient of each.
            used: gradients of the same backward that are still read, so their memory must not be changed.
        """
        sums, added = [], []
        read = {x.untyped_storage()._cdata for x in used}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                continue
            total = self._sums.get(id(parameter))
            if total is None:
                self._sums[id(parameter)] = self._first(gradient, read)
            else:
                sums.append(total)
                added.append(gradient)
        if sums:
            torch._foreach_add_(sums, added)

    def _first(self, gradient: Tensor, read: Set[int]) -> Tensor:
        """Return the sum that begins with a gradient, whose memory may be among storages that are still read."""
        if gradient.dtype in (torch.bfloat16, torch.float16):
            return gradient.float()  # many small bf16 gradients added in bf16 would lose their low bits
        if gradient.layout != torch.strided:
            return gradient
        # Autograd gives both terms of a sum one tensor, and a term that was expanded an expanded one.
        storage = gradient.untyped_storage()._cdata
        if storage in self._storages or storage in read or not gradient.is_contiguous():
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        self._storages.add(gradient.untyped_storage()._cdata)
        return gradient

    def add_linear(self, weight: nn.Parameter, kernel: LinearKernel, x: Tensor, gradient: Tensor) -> None:
        """Add the gradient of a linear layer's weight, at once if no rounding of it is lost; see ``LinearKernel``."""
        total = self._sums.get(id(weight))
        if total is None or total.dtype != gradient.dtype:
            self.add([weight], [kernel.weight_gradient(x, gradient)])
        else:
            kernel.weight_gradient(x, gradient, total=total)

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the sum for a parameter; None if it has no gradient."""
        return self._sums.get(id(parameter))

    def put(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Replace the sum for a parameter."""
        self._sums[id(parameter)] = total

    def attach(self, loss: Tensor | None, other: Tensor) -> Tensor:
        """Return ``loss + other``; backward gives the sums, times the gradient of this result, to the parameters."""
        sums = [self._sums.get(id(parameter)) for parameter in self.parameters]
        self._sums, self._storages = {}, set()
        with reading_shards():
            total: Tensor = _AddGradients.apply(loss, other, sums, self._begin, *self.parameters)
        return total

    def _begin(self) -> None:
        """Begin the pass, on every stage of a pipeline, if hooks run at its end, also where no gradient arrives."""
        for parameter, has_gradient in self.elsewhere:
            show_elsewhere(parameter, has_gradient)
        for sync in self.syncs[:1]:
            if sync.hooks.are_any:
                sync.begin()


@contextlib.contextmanager
def _without_hooks(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Turn off gradient hooks inside the context, since they run once, on the sum, as on one device."""
    found = [
        hooks for p in parameters for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks) if hooks is not None
    ]
    with contextlib.ExitStack() as stack:
        for hooks in found:
            stack.enter_context(hooks.off() if isinstance(hooks, ProgramHooks) else _cleared(hooks))
        yield


@contextlib.contextmanager
def _cleared(hooks: dict[int, Any]) -> Iterator[None]:
    """Empty a dict inside the context."""
    before = dict(hooks)
    hooks.clear()
    try:
        yield
    finally:
        hooks.update(before)


class _AddGradients(TensorFunction):
    """Adds to a loss a number whose gradients are already computed."""

    instead = UNSPLIT

    @staticmethod
    def forward(
        ctx: Node,
        loss: Tensor,
        other: Tensor,
        gradients: list[Tensor | None],
        begin: Callable[[], None],
        *parameters: Tensor,
    ) -> Tensor:
        ctx.gradients, ctx.begin = gradients, begin
        return loss + other

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> tuple[object, ...]:
        # Scale these gradients in place and release them, since they are as large as all gradients of the model.
        gradients, keeps = ctx.gradients, keeps_graph()
        if gradients is None:
            raise RuntimeError(TWICE)
        ctx.begin()
        if keeps:
            return grad, None, None, None, *[None if g is None else g * grad for g in gradients]
        ctx.gradients = None
        if is_known_one(grad):
            return grad, None, None, None, *gradients
        return grad, None, None, None, *[None if g is None else g.mul_(grad) for g in gradients]


def sum_copies_in_backward(parameters: Iterable[nn.Parameter], tp: Axis) -> None:
    """Sum each partial gradient (see ``TensorLayout.addends``) as it arrives, on every rank that holds it.

    This is one all-reduce over tp per parameter and pass. Backward visits the parameters in the same order on
    all ranks of the axis, since they run the same graph.

    Args:
        parameters: trainable parameters with layouts.
        tp: the axis whose ranks hold the copies.
    """
    for parameter in parameters:
        if layout_of(parameter).has_addends:
            parameter.register_hook(partial(sum_copies, layout=layout_of(parameter), tp=tp))


def sum_copies(local: Tensor, layout: TensorLayout, tp: Axis) -> Tensor:
    """Return ``local`` with each row replaced by the sum over all copies of that row.

    Args:
        local: this rank's part of the gradient, in its shard's shape; half precision is summed in float32.
        layout: the parameter's layout.
        tp: the axis whose ranks hold the rows.
    """
    refuse_second_order("Write loss.backward(), or use a plan of one process")
    dtype = torch.promote_types(local.dtype, torch.float32)
    if not layout.is_sharded:
        return all_reduce(local.to(dtype, copy=True), tp).to(local.dtype)
    whole = torch.zeros(layout.shape, dtype=dtype, device=local.device)
    layout.add(whole, local.to(dtype))
    return layout.take(all_reduce(whole, tp)).to(local.dtype)


class LossScale:
    """The factor of losses whose backward runs inside of the model's forward.

    In float16 small gradients round to 0 unless the loss is scaled first. The gradients of micro-batches and of a
    pipeline are computed before ``scaler.scale(loss)`` runs, so the loss is multiplied here by the scale that the
    scaler has at this time, and the gradients are divided by it again when the loss's own gradient arrives. As scales
    are powers of 2, neither rounds.

    Args:
        facts: what the model shows.
    """

    def __init__(self, facts: Facts):
        self._dtypes = {parameter.dtype for parameter in facts.parameters.values()}
        self._scaler: weakref.ref[GradScaler] | None = None

    def follow(self, scaler: GradScaler) -> None:
        """Use the scale of this scaler from now on."""
        self._scaler = weakref.ref(scaler)

    def is_needed(self, device: torch.device) -> bool:
        """Return whether the forward pass that runs now computes in float16."""
        kind = device.type
        is_cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
        return is_cast or torch.float16 in self._dtypes

    def of(self, device: torch.device) -> Tensor | float | None:
        """Return the factor for the forward pass that runs now; None if there is none."""
        if not self.is_needed(device):
            return None
        scaler = None if self._scaler is None else self._scaler()
        if scaler is None:  # the program's first pass
            found = [one for one in gc.get_objects() if issubclass(type(one), GradScaler) and one.is_enabled()]
            if not found:
                return None
            scaler = found[-1]
            self.follow(scaler)
        return scaler._init_scale if scaler._scale is None else scaler._scale.detach().clone()
