"""Masks of FlexAttention, which skips blocks of queries and keys between which no pair is seen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from meshwright.context.masks import ContextMask
from meshwright.parallel.sequence_parts import TokenRun

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def is_flex(stock: Callable[..., object]) -> bool:
    """Return whether an attention function is the one by which transformers calls FlexAttention."""
    module = sys.modules.get("transformers.integrations.flex_attention")
    return module is not None and stock is module.flex_attention_forward


def block_mask(mask: ContextMask, queries: TokenRun, keys: TokenRun) -> BlockMask:
    """Return the mask of some queries and keys, which FlexAttention counts from 0.

    Queries beyond the end of the sequence act as the last one, and keys beyond it are not seen. It is made once for all
    layers of a forward pass.
    """
    if (queries, keys) not in mask.of_flex:
        mask.of_flex[queries, keys] = _made(mask, queries, keys)
    return mask.of_flex[queries, keys]


def _made(mask: ContextMask, queries: TokenRun, keys: TokenRun) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask  # imports torch's compiler

    function, padding, last = mask.function, mask.padding, mask.length - 1  # which keep the mask itself out of a cycle

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = key + keys.start
        inside = place.clamp(max=last)
        seen: Tensor = function(row, head, (query + queries.start).clamp(max=last), inside)
        if padding is not None:
            seen = seen & padding[row, inside].bool()
        return seen & (place <= last)

    return create_block_mask(is_seen, mask.rows, None, queries.size, keys.size, device=str(mask.device))
