"""The causal-LM loss of one device, on every rank: one global mean over all valid tokens.

It takes the place of transformers' ``ForCausalLMLoss`` through ``model.loss_function``, with the same
arguments: label shift, ``shift_labels``, ``ignore_index`` and ``num_items_in_batch``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.parallel.collectives import Axis, all_gather
from meshwright.parallel.cross_entropy import VocabParallelCrossEntropy
from meshwright.parallel.guarded import ShardedLogits

logger = logging.getLogger(__name__)

NumItems = Literal["auto", "global", "local"]


def uses_causal_lm_loss(model: nn.Module) -> bool:
    """Whether the loss is transformers' causal-LM loss, which ours stands in for; a user's own stays."""
    if getattr(getattr(model, "loss_function", None), "__name__", None) != "ForCausalLMLoss":
        return False
    # Every transformers model of a causal LM has the attribute; decoders of older families do not read it.
    forwards = (inspect.unwrap(vars(kind)["forward"]) for kind in type(model).__mro__ if "forward" in vars(kind))
    return any("loss_function" in forward.__code__.co_names for forward in forwards if hasattr(forward, "__code__"))


class CausalLMLoss:
    """Sum over the valid tokens of all data-parallel ranks, divided by their global count.

    The value is the same on every rank. The gradient carries a factor dp, so that averaging gradients
    over the data-parallel axis (as torch DDP does) gives the gradient of that value.

    Args:
        vocab_size: words of the full vocabulary.
        tp: axis over which the logits may be sharded.
        dp: axis over which the batch is split.
        num_items: how ``num_items_in_batch`` is meant; see ToDistributedConfig.num_items_in_batch.
    """

    def __init__(self, *, vocab_size: int, tp: Axis, dp: Axis, num_items: NumItems = "auto"):
        self.vocab_size = vocab_size
        self.tp, self.dp, self.num_items = tp, dp, num_items
        self._has_warned = False
        self._divisor: Tensor | None = None

    @contextlib.contextmanager
    def divided_by(self, count: Tensor) -> Iterator[None]:
        """Divide every sum inside by ``count``, the valid tokens of a larger global batch."""
        self._divisor = count
        try:
            yield
        finally:
            self._divisor = None

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if shift_labels is None:
            assert labels is not None, "a loss needs labels or shift_labels"
            shift_labels = shift(labels, ignore_index)
        targets_N = shift_labels.reshape(-1).to(logits.device)
        loss_sum = self._sum(logits, targets_N, ignore_index)
        total, count = self._global(loss_sum.detach(), (targets_N != ignore_index).sum(), num_items_in_batch)
        return _ReplaceValue.apply(loss_sum, total / count, self.dp.size / count)

    def _sum(self, logits: Tensor, targets_N: Tensor, ignore_index: int) -> Tensor:
        if isinstance(logits, ShardedLogits):
            logits = logits.as_subclass(Tensor)
        words = logits.shape[-1]
        if words >= self.vocab_size:  # whole: by its width, since the fake tensors of a traced plan have no such type
            logits_NV = at_least_float32(logits.reshape(-1, words))
            return F.cross_entropy(logits_NV, targets_N, ignore_index=ignore_index, reduction="sum")
        first_word = min(self.tp.rank * words, self.vocab_size)
        num_words = min(words, self.vocab_size - first_word)
        return VocabParallelCrossEntropy.apply(
            at_least_float32(logits.reshape(-1, words)),
            targets_N,
            first_word,
            num_words,
            ignore_index,
            self.tp,
        )

    def _global(self, loss_sum: Tensor, valid: Tensor, num_items: Tensor | float | None) -> tuple[Tensor, Tensor]:
        items = valid if num_items is None else torch.as_tensor(num_items, device=loss_sum.device)
        # float64: a count above 2**24 would lose tokens in float32.
        own = torch.stack([loss_sum.double(), valid.double(), items.double().reshape(())])
        ranks = all_gather(own[None], self.dp)
        total, valid_total = ranks[:, 0].sum(), ranks[:, 1].sum()
        if num_items is not None:
            count = self._items(ranks[:, 2], valid_total)
        else:
            count = valid_total if self._divisor is None else self._divisor
        return total.to(loss_sum.dtype), count.to(loss_sum.dtype)

    def _items(self, per_rank: Tensor, valid_total: Tensor) -> Tensor:
        """What ``num_items_in_batch`` divides by: the global count."""
        meaning = self.num_items
        if meaning == "auto":
            is_global = bool((per_rank == per_rank[0]).all()) and bool(per_rank[0] >= valid_total)
            meaning = "global" if is_global else "local"
            if is_global and per_rank[0] > valid_total and self.dp.size > 1 and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "num_items_in_batch=%g is the same on all %d data-parallel ranks and is read as the count of "
                    "the global batch; if it counts this rank's rows only, set "
                    "ToDistributedConfig(num_items_in_batch='local')",
                    per_rank[0].item(),
                    self.dp.size,
                )
        return per_rank[0] if meaning == "global" else per_rank.sum()


class _ReplaceValue(torch.autograd.Function):
    """A scalar with another value, and its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (factor,) = ctx.saved_tensors
        return grad * factor, None, None


def shift(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Labels moved so that each token's target is the token after it."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def at_least_float32(x: Tensor) -> Tensor:
    """Half-precision logits are too coarse for a softmax over a vocabulary."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
