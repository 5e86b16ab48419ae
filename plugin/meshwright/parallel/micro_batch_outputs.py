"""What a forward pass returns whose batch ran as micro-batches: the outputs of all of them, or an error when read."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import UnreadableTensorError
from meshwright.parallel.tensor_guards import ShardedLogits, is_metadata


class Pieces:
    """The outputs of the micro-batches of one batch.

    Args:
        rows: of each micro-batch; 0 where it only keeps this rank in step.
        keeps: whether tensors of all micro-batches are kept (``ToDistributedConfig.gather_logits``).
    """

    def __init__(self, rows: list[int], *, keeps: bool):
        self.rows, self.keeps = rows, keeps
        self._outputs: list[Any] = []

    def add(self, output: Any) -> None:
        """Note the output of the next micro-batch but the last."""
        if self.keeps:
            self._outputs.append(_mapped(output, lambda x, _: x.detach(), []))

    def whole(self, last: Any, loss: Tensor) -> Any:
        """The output of the last micro-batch, made that of the batch."""
        if len(self.rows) == 1:
            return last
        return _mapped(last, self._join if self.keeps else self._stand_in, self._outputs, loss)

    def _join(self, last: Tensor, before: list[Tensor]) -> Tensor:
        parts = [x[:rows] for x, rows in zip([*before, last.detach()], self.rows, strict=True)]
        return _Read.apply(torch.cat(parts).requires_grad_())

    def _stand_in(self, last: Tensor, _: list[Tensor]) -> Tensor:
        empty = torch.empty((), dtype=last.dtype, device=last.device)
        return empty.expand(sum(self.rows), *last.shape[1:]).as_subclass(_Unkept)


def _mapped(output: Any, join: Callable[[Tensor, list[Any]], Tensor], before: list[Any], loss: Any = None) -> Any:
    """The output with each tensor but the loss replaced, given those of the outputs ``before`` in the same place."""

    def at(value: Any, others: list[Any]) -> Any:
        if isinstance(value, ShardedLogits):  # which say themselves that they cannot be read
            return value
        if isinstance(value, Tensor) and value.ndim:
            return join(value, others)
        if isinstance(value, tuple | list):
            return tuple(at(x, [other[i] for other in others]) for i, x in enumerate(value))
        return None if not isinstance(value, Tensor) else value  # a cache is of no use to a batch in training

    if isinstance(output, Tensor):
        return output if loss is None else loss
    if isinstance(output, tuple | list):
        rest = [at(x, [other[i] for other in before]) for i, x in enumerate(output) if i]
        values = [output[0] if loss is None else loss, *rest]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    names = list(output) if isinstance(output, MutableMapping) else list(vars(output))
    named = {n: at(getattr(output, n), [getattr(other, n) for other in before]) for n in names if n != "loss"}
    named["loss"] = output.loss if loss is None else loss
    if isinstance(output, MutableMapping):
        return type(output)(**named)
    new = copy.copy(output)
    vars(new).update(named)
    return new


class _Read(torch.autograd.Function):
    """Outputs that may be read, and whose gradient comes too late: the backward passes of most of them are over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise UnreadableTensorError(
            "the plan runs this batch as micro-batches, whose backward passes are over when outputs.logits is read, so "
            "a second loss on it would train on nothing. Set gradient_accumulation_steps=1 (and micro_batch_size=None) "
            "in the ParallelPlan, and accumulate in the loop; a metric reads outputs.logits.detach()"
        )


class _Unkept(Tensor):
    """Outputs of the whole batch, of which none were kept."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_metadata(func):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise UnreadableTensorError(
            "the plan runs this batch as micro-batches, and keeps none of their outputs but the loss, so that they "
            "need not fit in memory together. To read outputs.logits of the batch pass "
            "ToDistributedConfig(gather_logits=True), or call the model in eval mode or without labels"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "(of micro-batches, not kept: see ToDistributedConfig.gather_logits)"
