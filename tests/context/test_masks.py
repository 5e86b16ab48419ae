"""Masks as functions: blocks are those of transformers' own masks, and the ranges hold all that is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.modeling_utils  # noqa: F401, which defines the attention interface
from transformers import LlamaConfig, MistralConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask, sdpa_mask

from meshwright.context import attention
from meshwright.context.masks import ContextMask
from meshwright.parallel.sequence_parts import TokenRun

pytestmark = pytest.mark.quick

LENGTH = 23
PACKED = torch.cat([torch.arange(4), torch.arange(9), torch.arange(10)])
INPUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"position_ids": torch.stack([PACKED, PACKED.roll(0)])},
    "packed otherwise in each row": {"position_ids": torch.stack([PACKED, torch.arange(LENGTH)])},
    "padded": {"attention_mask": (torch.arange(LENGTH) >= torch.tensor([[3], [0]])).long()},
}


def masks(inputs: dict[str, Any], *, window: bool) -> tuple[ContextMask, torch.Tensor]:
    """Ours and transformers' own for the same batch."""
    attention._register()
    config = MistralConfig(sliding_window=5) if window else LlamaConfig()
    create = create_sliding_window_causal_mask if window else create_causal_mask
    given = {"attention_mask": None, "past_key_values": None, "inputs_embeds": torch.zeros(2, LENGTH, 1), **inputs}
    config._attn_implementation = "sdpa"
    stock = create(config=config, **given)
    if stock is None:
        stock = sdpa_mask(2, LENGTH, LENGTH, allow_is_causal_skip=False)
    config._attn_implementation = attention.NAME
    return create(config=config, **given), stock


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("kind", INPUTS)
def test_blocks_are_those_of_transformers(kind: str, window: bool) -> None:
    own, stock = masks(INPUTS[kind], window=window)
    for start in range(0, LENGTH, 3):
        queries = TokenRun(start, min(3, LENGTH - start))
        wanted = stock[:, :, start : queries.stop]
        assert torch.equal(own.block(queries, TokenRun(0, LENGTH)).expand_as(wanted), wanted)
        low, high = own.visible(queries)
        assert not wanted[..., :low].any() and not wanted[..., high:].any()
        if kind != "padded":
            assert high == queries.stop


def test_documents_limit_the_range_without_measuring() -> None:
    """If transformers combined its masks otherwise, the range would be measured, which takes longer."""
    own, _ = masks(INPUTS["packed"], window=False)
    assert own._derived(TokenRun(15, 3)) == (13, 18) and own._derived(TokenRun(2, 5)) == (0, 7)
    mixed, _ = masks(INPUTS["packed otherwise in each row"], window=False)
    assert mixed._derived(TokenRun(15, 3)) == (0, 18)
    padded, _ = masks(INPUTS["padded"], window=False)
    assert padded._derived(TokenRun(15, 3)) == (0, 18)
