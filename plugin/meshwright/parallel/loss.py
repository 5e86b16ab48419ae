"""The causal-LM loss of one device, on every rank: one global mean over all valid tokens.

It takes the place of transformers' ``ForCausalLMLoss`` through ``model.loss_function``, with the same
arguments: label shift, ``shift_labels``, ``ignore_index`` and ``num_items_in_batch``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.parallel.checks import require_words
from meshwright.parallel.collectives import Axis
from meshwright.parallel.cross_entropy import VocabParallelCrossEntropy
from meshwright.parallel.guarded import ShardedLogits
from meshwright.parallel.mean import IGNORE_INDEX, GlobalMean


def uses_causal_lm_loss(model: nn.Module) -> bool:
    """Whether the loss is transformers' causal-LM loss, which ours stands in for; a user's own stays."""
    if getattr(getattr(model, "loss_function", None), "__name__", None) != "ForCausalLMLoss":
        return False
    # Every transformers model of a causal LM has the attribute; decoders of older families do not read it.
    forwards = (inspect.unwrap(vars(kind)["forward"]) for kind in type(model).__mro__ if "forward" in vars(kind))
    return any("loss_function" in forward.__code__.co_names for forward in forwards if hasattr(forward, "__code__"))


class CausalLMLoss:
    """Sum over the valid tokens of all data-parallel ranks, divided by their global count; see GlobalMean.

    Args:
        vocab_size: words of the full vocabulary.
        tp: axis over which the logits may be sharded.
        mean: over the axis by which the batch is split.
    """

    def __init__(self, *, vocab_size: int, tp: Axis, mean: GlobalMean):
        self.vocab_size, self.tp, self.mean = vocab_size, tp, mean

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if shift_labels is None:
            assert labels is not None, "a loss needs labels or shift_labels"
            shift_labels = shift(labels, ignore_index)
        targets_N = shift_labels.reshape(-1).to(logits.device)
        loss_sum = self._sum(logits, targets_N, ignore_index)
        return self.mean.of(loss_sum.reshape(1), (targets_N != ignore_index).sum().reshape(1), num_items_in_batch)

    def _sum(self, logits: Tensor, targets_N: Tensor, ignore_index: int) -> Tensor:
        if isinstance(logits, ShardedLogits):
            logits = logits.as_subclass(Tensor)
        words = logits.shape[-1]
        if words >= self.vocab_size:  # whole: by its width, since the fake tensors of a traced plan have no such type
            logits_NV = at_least_float32(logits.reshape(-1, words))
            return F.cross_entropy(logits_NV, targets_N, ignore_index=ignore_index, reduction="sum")
        require_words(targets_N, self.vocab_size, "label", ignored=ignore_index)
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


def shift(labels: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Labels moved so that each token's target is the token after it."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def at_least_float32(x: Tensor) -> Tensor:
    """Half-precision logits are too coarse for a softmax over a vocabulary."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
