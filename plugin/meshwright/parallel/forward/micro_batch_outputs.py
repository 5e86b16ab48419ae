"""The output of a batch that ran as micro-batches: their joined outputs, or tensors that raise when read."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from meshwright.autograd import Node, TensorFunction
from meshwright.containers import rebuilt
from meshwright.errors import UnreadableTensorError
from meshwright.parallel.batch.mean_over_ranks import GlobalMean
from meshwright.parallel.experts.load_balancing import PartedRouterLogits
from meshwright.parallel.shards.stand_in import ShardedLogits, StandIn

_Join = Callable[[Tensor, list[Any]], Tensor]  # a tensor of the last output, and its counterparts


class Pieces:
    """Collects the outputs of one batch's micro-batches.

    Args:
        rows: the number of rows of each micro-batch; 0 for a micro-batch that only keeps this rank in step.
        keeps: whether the output tensors of all micro-batches are kept (``ToDistributedConfig.gather_logits``).
        mean: the mean that the model's loss is, which knows what the forward has added to it.
    """

    def __init__(self, rows: list[int], *, keeps: bool, mean: GlobalMean):
        self.rows, self.keeps, self.mean = rows, keeps, mean
        self._outputs: list[object] = []

    def add(self, output: object) -> None:
        """Add the output of the next micro-batch. The output of the last one goes to :meth:`whole`."""
        if self.keeps:
            self._outputs.append(_mapped(output, lambda x, _: x.detach(), []))

    def whole(self, last: object, loss: Tensor) -> object:
        """Return the output of the batch, given the output of its last micro-batch and the batch's loss."""
        if len(self.rows) == 1:
            return last
        return _mapped(last, self._whole, self._outputs, loss)

    def _whole(self, last: Tensor, before: list[Tensor]) -> Tensor:
        if last is self.mean.last_added:
            return read_only(self.mean.all_added)
        if not last.ndim:
            return UnaddedNumber.of_shape((), last.dtype, last.device)
        of_batch = (sum(self.rows), *last.shape[1:])
        if not self.keeps:
            return UnkeptOutput.of_shape(of_batch, last.dtype, last.device)
        outputs = [*before, last.detach()]
        if any(len(x) != max(rows, 1) for x, rows in zip(outputs, self.rows, strict=True)):  # it has no dim of rows
            return UnkeptOutput.of_shape(last.shape, last.dtype, last.device)
        return read_only(torch.cat([x[:rows] for x, rows in zip(outputs, self.rows, strict=True)]))


def _mapped(output: object, join: _Join, before: list[Any], loss: Tensor | None = None) -> object:
    """Return an output in which ``join(tensor, [its counterparts in before])`` replaces each tensor but the loss."""

    if isinstance(output, Tensor):
        return output if loss is None else loss
    if isinstance(output, tuple | list):
        rest = [_joined(x, [other[i] for other in before], join) for i, x in enumerate(output) if i]
        return rebuilt(output, [output[0] if loss is None else loss, *rest])
    names = list(output) if isinstance(output, MutableMapping) else list(vars(output))
    others = {n: [getattr(other, n) for other in before] for n in names}
    named = {n: _joined(getattr(output, n), others[n], join) for n in names if n != "loss"}
    named["loss"] = getattr(output, "loss", None) if loss is None else loss
    if isinstance(output, MutableMapping):
        return type(output)(**named)
    new = copy.copy(output)
    vars(new).update(named)
    return new


# Not a closure: one that calls itself is a reference cycle, which would hold the outputs until the next collection.
def _joined(value: object, others: list[Any], join: _Join) -> object:
    if isinstance(value, ShardedLogits | PartedRouterLogits):  # these already raise when they are read
        return value
    if isinstance(value, Tensor):
        return join(value, others)
    if isinstance(value, tuple | list):
        return tuple(_joined(x, [other[i] for other in others], join) for i, x in enumerate(value))
    return None  # drop a cache, which training does not use


def read_only(logits: Tensor) -> Tensor:
    """Return logits that can be read, but raise in the backward pass of a loss that the program computes of them."""
    return _Read.apply(logits.requires_grad_())


class _Read(TensorFunction):
    """Allows reading joined outputs, and raises in backward, since most micro-batches' backward passes are over."""

    has_graph = True  # it has none to lack

    @staticmethod
    def forward(ctx: Node, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> Tensor:
        raise UnreadableTensorError(
            "a second loss on outputs.logits, or on another output, would not reach the parameters: the plan runs this "
            "batch as micro-batches, whose backward passes are over when the output is read. Set "
            "ParallelPlan(gradient_accumulation_steps=1, micro_batch_size=None, pp=1) and accumulate in the loop. For "
            "a metric, read outputs.logits.detach()"
        )


class UnkeptOutput(StandIn):
    """Stands in for an output of the whole batch that was not kept; reading it raises."""

    MESSAGE = (
        "this output was not kept: the plan runs the batch as micro-batches and keeps only their loss, so that "
        "their outputs need not fit in memory together. To read outputs.logits of the batch, pass "
        "ToDistributedConfig(gather_logits=True), or call the model in eval mode or without labels"
    )


class UnaddedNumber(StandIn):
    """Stands in for a number of the whole batch that does not follow from the numbers of its micro-batches."""

    MESSAGE = (
        "the plan runs the batch as micro-batches, each of which has a number of its own here, and the number of the "
        "whole batch is unknown. Set ParallelPlan(gradient_accumulation_steps=1, micro_batch_size=None) "
        "and accumulate in the loop, or call the model in eval mode or without labels"
    )
