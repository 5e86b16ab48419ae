"""Differences between model families and Llama that configs do not state: in matrices and in what forward saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.plan.context_methods import METHODS

# Families whose sizes were compared with those of transformers' own modules. Of others a Llama's layers are assumed.
COMPARED = frozenset(
    {
        "apertus", "arcee", "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2", "cohere_compass_text", "ctrl",
        "cwm", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt-sw3", "gpt2",
        "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj", "granite", "granite_swa", "helium",
        "hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "jais2", "lfm2", "llama", "ministral",
        "ministral3", "mistral", "modernbert-decoder", "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmo3",
        "openai-gpt", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm",
        "starcoder2", "vaultgemma", "xglm",
    }
)  # fmt: skip
# Families whose MLP has two matrices, up and down. The config does not show this: BitNet's MLP has the same activation
# as Arcee's, but is gated.
NOT_GATED = frozenset(
    {
        "apertus", "arcee", "biogpt", "bloom", "codegen", "ctrl", "falcon", "gpt2", "gpt_bigcode", "gpt_neo",
        "gpt_neox", "gpt_neox_japanese", "gptj", "jais2", "mpt", "nanochat", "nemotron", "openai-gpt", "opt",
        "persimmon", "phi", "starcoder2", "xglm",
    }
)  # fmt: skip
# Families of NOT_GATED whose projections have biases only if the config says so.
_BIASES_IN_CONFIG = frozenset({"apertus", "arcee", "falcon", "jais2", "mpt", "nanochat", "nemotron"})
_WITHOUT_NORM_BIASES = frozenset({"apertus", "arcee", "mpt", "nanochat"})
LEARNED_POSITIONS = frozenset({"biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt"})
# Families in which embedding and head are one matrix unless the config says otherwise; ``is_tied`` adds all Gemmas.
_TIED = frozenset(
    {
        "biogpt", "bloom", "cohere", "cohere2", "cohere_compass_text", "ctrl", "ernie4_5", "falcon", "gpt2",
        "gpt_bigcode", "gpt_neo", "gpt_neox_japanese", "granite_swa", "lfm2", "modernbert-decoder", "mpt", "openai-gpt",
        "opt", "smollm3", "starcoder2", "vaultgemma", "xglm",
    }
)  # fmt: skip
# Families whose sizes do not follow from the usual fields of a config, and the reasons.
UNKNOWN_SIZES = {
    "gemma4_text": "the heads of its layers are of different widths",
    "gemma4_unified_text": "the heads of its layers are of different widths",
    "moshi": "its MLP is half as wide as its config says",
}

# Families whose attention does not call transformers' attention interface, which context parallelism works through.
_OWN_ATTENTION = frozenset(
    {"bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "mvp", "openai-gpt", "xglm"}
)
_READS_ALL_HEADS = frozenset({"granite_swa"})  # their attention cannot run on a part of the heads

# Causal LMs whose forward casts the logits to 32 bits, and those that do so only to cap them.
CASTS_LOGITS = frozenset(
    {"blt", "falcon_mamba", "inkling2", "mamba", "mamba2", "mllama", "mllama_text_model", "nemotron_h", "xlstm"}
)
CASTS_CAPPED_LOGITS = frozenset({"beam"})


def is_tied(family: str, config: Mapping[str, object]) -> bool:
    """Return whether embedding and head are one matrix."""
    return bool(config.get("tie_word_embeddings", family in _TIED or family.startswith("gemma")))


def has_biases(family: str) -> bool:
    """Return whether a family's projections always have biases, without a config field for them."""
    return family in NOT_GATED - _BIASES_IN_CONFIG


def has_norm_biases(family: str) -> bool:
    """Return whether a layer's norms are LayerNorms with a bias."""
    return family in NOT_GATED - _WITHOUT_NORM_BIASES


def shares_one_key_head(config: Mapping[str, object]) -> bool:
    """Return whether the flag ``multi_query`` of the config says that there is a single key head."""
    return bool(config.get("multi_query")) and not config.get("new_decoder_architecture")


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties of a family's code that decide which tensors forward saves for backward.

    Args:
        norms: number of norms per layer on the residual stream.
        norms_in_float32: whether a norm multiplies by its weight in 32 bits.
        norm_copies_weight: whether a norm computes a new 32-bit tensor, 1 + weight.
        query_norm: what a norm of q and of k covers: each "head", or the "whole" projection; None without such norms.
        rotates_in_float32: whether sines and cosines stay in 32 bits.
        fused_qkv: whether one projection makes q, k and v, so that its whole output stays alive as long as v.
        keeps_scores: whether attention stores its scores, as eager attention does, for example to cap them.
        caps_logits: whether the head's logits are capped.
        casts_logits: whether the model casts the head's logits to 32 bits before its loss.
        qkv_bias, output_bias, mlp_bias: whether these projections have biases.
        context: the methods of context parallelism that the attention can use.

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
    casts_logits: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    context: tuple[str, ...] = METHODS

    @property
    def norms_outputs(self) -> bool:
        """Whether a block's output is normalized before it is added to the residual stream."""
        return self.norms == 4 or self.query_norm == "whole"


def _context_methods(family: str) -> tuple[str, ...]:
    if family in _OWN_ATTENTION:
        return ()
    return ("gather", "ring") if family in _READS_ALL_HEADS else METHODS


def traits_of(family: str, config: Mapping[str, object]) -> Traits:
    """Return the traits of a transformers model.

    Args:
        family: the ``model_type`` of the model's config.
        config: the model's config as a dict.

    Example:
        >>> traits_of("qwen3", {}).query_norm
        'head'
    """
    caps = config.get("final_logit_softcapping") is not None
    common: dict[str, Any] = {
        "keeps_scores": config.get("_attn_implementation") == "eager",
        "qkv_bias": bool(config.get("attention_bias", family == "qwen2")),
        "output_bias": bool(config.get("attention_bias")) and family != "qwen2",
        "mlp_bias": bool(config.get("mlp_bias")),
        "context": _context_methods(family),
        "caps_logits": caps,
        "casts_logits": family in CASTS_LOGITS or (family in CASTS_CAPPED_LOGITS and caps),
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
            **common,
        )
    return Traits(**common)
