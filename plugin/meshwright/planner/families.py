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
        qkv_bias, output_bias, mlp_bias: which projections have biases.

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
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def norms_outputs(self) -> bool:
        """Whether a block's output is normed before it joins the residual stream."""
        return self.norms == 4 or self.query_norm == "whole"


def traits_of(family: str, config: Mapping[str, Any]) -> Traits:
    """Return the traits of a transformers family.

    Args:
        family: its ``model_type``.
        config: its config.

    Example:
        >>> traits_of("qwen3", {}).query_norm
        'head'
    """
    common: dict[str, Any] = {
        "keeps_scores": config.get("_attn_implementation") == "eager",
        "qkv_bias": bool(config.get("attention_bias", family == "qwen2")),
        "output_bias": bool(config.get("attention_bias")) and family != "qwen2",
        "mlp_bias": bool(config.get("mlp_bias")),
    }
    if family == "qwen3":
        return Traits(query_norm="head", **common)
    if family == "olmo2":
        return Traits(norms_in_float32=True, query_norm="whole", rotates_in_float32=True, **common)
    if family == "phi3":
        return Traits(fused_qkv=True, **common)
    if family.startswith("gemma"):
        return Traits(
            norms=2 if family == "gemma" else 4,
            norms_in_float32=True,
            norm_copies_weight=True,
            query_norm="head" if family.startswith("gemma3") else None,
            caps_logits=config.get("final_logit_softcapping") is not None,
            **common,
        )
    return Traits(**common)
