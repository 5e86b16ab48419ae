"""Run one batch as several micro-batches inside ``model(**batch)``, for the user's loop unchanged.

All but the last micro-batch run forward and backward within the call, into gradients of their own.
The returned loss is that of the whole batch; its backward adds those gradients while it runs the last
micro-batch's, so reduction still overlaps with computation and happens once. Without ``backward()``
nothing is left behind. Under ZeRO stages 2 and 3 each micro-batch's gradients are reduced as they come,
and a rank keeps its shard of their sum.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.parallel.collectives import Axis, maximum
from meshwright.parallel.forward import arguments
from meshwright.parallel.gradients import GradientSync
from meshwright.parallel.head_losses import BatchLoss
from meshwright.parallel.mean import TARGETS, without_targets
from meshwright.parallel.outputs import loss_of, with_loss


def split_forward(
    model: nn.Module,
    *,
    dp: Axis,
    syncs: list[GradientSync],
    loss: BatchLoss,
    micro_batch_size: int | None,
    num_micro_batches: int,
) -> None:
    """Make ``model.forward`` split training batches along dim 0.

    Args:
        model: its forward returns an output with ``.loss``.
        dp: axis over which the batch is split already.
        syncs: where the gradients of inner micro-batches wait; either whole, all of them, or reduced, in the only one.
        loss: the model's loss, told to divide by the counts of the whole batch.
        micro_batch_size: rows of a micro-batch; None: from ``num_micro_batches``.
        num_micro_batches: into how many a rank's rows are split, where ``micro_batch_size`` is None.
    """
    forward = model.forward
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def split(*args: Any, **kwargs: Any) -> Any:
        batch = arguments(signature, args, kwargs)
        targets = next((x for name in TARGETS if isinstance(x := batch.get(name), Tensor)), None)
        if not (model.training and torch.is_grad_enabled() and targets is not None):
            return forward(*args, **kwargs)
        rows = targets.shape[0]
        # Every rank runs the same number of passes: the loss of each is a collective.
        count = num_micro_batches if micro_batch_size is None else -(-rows // micro_batch_size)
        count = int(maximum(torch.tensor(count, device=targets.device), dp))
        # A number of items is about the whole batch, so that what it means is settled before the batch is split.
        divisors = loss.mean.divisors(loss.counts(batch), batch.get("num_items_in_batch"))
        with loss.mean.divided_by(divisors):
            return _run(model, forward, syncs, loss, _split(batch, rows, count))

    model.forward = split


def _split(batch: dict[str, Any], rows: int, count: int) -> list[dict[str, Any]]:
    """Pieces along dim 0 of what has the batch's rows; a piece without rows is one that does not count."""

    def rows_of(value: Any, low: int, high: int) -> Any:
        has_rows = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == rows
        return value[low:high] if has_rows else value

    pieces = []
    for index in range(count):
        low, high = index * rows // count, (index + 1) * rows // count
        piece = {name: rows_of(value, low, max(high, low + 1)) for name, value in batch.items()}
        if low == high:
            piece = without_targets(piece)
        pieces.append(piece)
    return pieces


def _run(
    model: nn.Module,
    forward: Callable[..., Any],
    syncs: list[GradientSync],
    loss_over_dp: BatchLoss,
    batches: list[dict[str, Any]],
) -> Any:
    *inner, last = batches
    whole = all(sync.reduction.can_wait for sync in syncs)
    gradients = _WholeGradients(model, syncs) if whole else _ReducedGradients(syncs)
    total: Tensor | None = None
    for batch in inner:
        loss = loss_of(loss_over_dp.of_output(batch, forward(**batch)))
        assert loss is not None
        gradients.add_from(loss)
        total = loss.detach() if total is None else total + loss.detach()
        del loss
    output = loss_over_dp.of_output(last, forward(**last))
    return output if total is None else with_loss(output, gradients.attach(loss_of(output), total))


class _WholeGradients:
    """The sum of inner micro-batches' gradients, whole, for autograd to hand to the parameters."""

    def __init__(self, model: nn.Module, syncs: list[GradientSync]):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.syncs = syncs
        self.sums: list[Tensor | None] = [None] * len(self.parameters)

    def add_from(self, loss: Tensor) -> None:
        with contextlib.ExitStack() as stack:
            for sync in self.syncs:
                stack.enter_context(sync.paused())
            new = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        self.sums = [_add(old, grad) for old, grad in zip(self.sums, new, strict=True)]

    def attach(self, loss: Tensor | None, other: Tensor) -> Any:
        return _AddGradients.apply(loss, other, self.sums, *self.parameters)


class _ReducedGradients:
    """The sum of inner micro-batches' gradients, this rank's shard of it."""

    def __init__(self, syncs: list[GradientSync]):
        (self.sync,) = syncs
        self.sums: dict[int, Tensor] | None = {}

    def add_from(self, loss: Tensor) -> None:
        assert self.sums is not None
        with self.sync.reduction.aside(self.sums):
            loss.backward()

    def attach(self, loss: Tensor | None, other: Tensor) -> Any:
        return _AddReduced.apply(loss, other, self)

    def add(self, factor: Tensor) -> None:
        sums, self.sums = self.sums, None
        if sums is None:
            raise RuntimeError(_TWICE)
        self.sync.reduction.add(sums, factor)


def _add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return total
    # float32, since many small bf16 gradients added in bf16 lose their low bits.
    grad = grad.float() if grad.dtype in (torch.bfloat16, torch.float16) else grad
    return grad if total is None else total.add_(grad)


_TWICE = "backward ran a second time through a batch that the plan splits into micro-batches"


class _AddGradients(torch.autograd.Function):
    """A loss plus a number whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, other: Tensor, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss + other

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # In place, and let go: they are as large as all gradients of the model.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(_TWICE)
        return grad, None, None, *[None if g is None else g.mul_(grad) for g in gradients]


class _AddReduced(torch.autograd.Function):
    """A loss plus a number whose gradients are reduced already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, other: Tensor, gradients: _ReducedGradients) -> Tensor:
        ctx.gradients = gradients
        return loss + other

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.gradients.add(grad)
        return grad, None, None
