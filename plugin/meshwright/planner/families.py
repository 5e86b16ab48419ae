"""What a family's code keeps for backward, where it differs from Llama's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Traits:
    """How a layer is computed, as far as it decides what backward needs.

    Args:
        norms: norms on the residual stream of a layer.
        norms_in_float32: a norm multiplies by its weight before it leaves 32 bits.
        norm_copies_weight: it makes a 32-bit weight of its own, 1 + weight.
        query_norm: q and k are normed: "head" by head, or the "whole" projection; None for neither.
        rotates_in_float32: sines and cosines stay in 32 bits.
        fused_qkv: one projection makes q, k and v, and lives as long as v does.
        keeps_scores: attention computes its scores one by one, as it must to cap them.
        caps_logits: the head's logits are capped.

    Example:
        >>> Traits().norms
        2
    """

    norms: int = 2
    norms_in_float32: bool = False
    norm_copies_weight: bool = False
    query_norm: Literal["head", "whole"] | None = None
    rotates_in_float32: bool = False
    fused_qkv: bool = False
    keeps_scores: bool = False
    caps_logits: bool = False


def traits_of(family: str, config: Mapping[str, Any]) -> Traits:
    """Return the traits of a transformers family.

    Args:
        family: its ``model_type``.
        config: its config.

    Example:
        >>> traits_of("qwen3", {}).query_norm
        'head'
    """
    keeps_scores = config.get("_attn_implementation") == "eager" or config.get("attn_implementation") == "eager"
    if family in ("qwen3", "qwen3_moe"):
        return Traits(query_norm="head", keeps_scores=keeps_scores)
    if family in ("olmo2", "olmo3"):
        return Traits(
            norms_in_float32=True, query_norm="whole", rotates_in_float32=True, keeps_scores=keeps_scores
        )
    if family in ("phi3", "glm4"):
        return Traits(fused_qkv=family == "phi3", keeps_scores=keeps_scores)
    if family.startswith("gemma"):
        return Traits(
            norms=2 if family == "gemma" else 4,
            norms_in_float32=True,
            norm_copies_weight=True,
            query_norm="head" if family.startswith("gemma3") else None,
            keeps_scores=keeps_scores or config.get("attn_logit_softcapping") is not None,
            caps_logits=config.get("final_logit_softcapping") is not None,
        )
    return Traits(keeps_scores=keeps_scores)
