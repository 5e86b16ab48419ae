"""Attention over keys that every rank has whole, such as those of an encoder's result.

Each query needs all keys and no other query, so a rank computes the attention of its own queries by the model's own
function, and sends nothing. The keys get a part of their gradient on each rank, and so do the weights behind them. The
parts are added up where the gradients of weights are averaged.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from meshwright.context.attend import AttentionCall, block_mask
from meshwright.context.masks import ContextMask
from meshwright.errors import PlanError
from meshwright.parallel.sequence_parts import TokenRun


def attend_across(call: AttentionCall, given: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of this rank's queries over keys that are not those of the sequence.

    Args:
        call: the attention.
        given: the mask that the attention was called with: one of transformers' functions, a tensor whose queries the
            layer's own tokens are, or None.
        q: this rank's queries, ``[B, heads, queries, d]``.
        k: all keys, ``[B, key heads, keys, d]``.
        v: their values.
    """
    mask = _own_mask(call, given, q) if isinstance(given, ContextMask) else given
    return call.run(q, k, v, mask)  # type: ignore[arg-type]


def _own_mask(call: AttentionCall, mask: ContextMask, q: Tensor) -> object:
    if not mask.is_for_all_queries:
        raise PlanError(
            f"{type(call.module).__name__} attends to the result of an encoder under a mask that differs between the "
            "tokens of a row, so a rank with some of the tokens cannot cut it. Use ParallelPlan(cp=1)"
        )
    padding = mask.padding
    if padding is None or call.is_flash:
        return padding
    if call.is_flex:
        of_keys = dataclasses.replace(mask, length=mask.keys, of_flex={})
        return block_mask(of_keys, TokenRun(0, q.shape[2]), TokenRun(0, mask.keys))
    seen = padding[:, None, None].bool()
    if not call.is_additive:
        return seen
    return torch.zeros(seen.shape, dtype=q.dtype, device=seen.device).masked_fill(~seen, torch.finfo(q.dtype).min)
