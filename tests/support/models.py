"""Tiny models of each family, with every trait of the real one switched on."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# 97 words: a vocabulary that neither 2 nor 4 divides, so the padding of the last shard is always there.
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 5, "head_dim": 4}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 4}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            "head_dim": 4,
            "sliding_window": 5,
            "query_pre_attn_scalar": 4,
            "attn_implementation": "eager",
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
}


def build(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A seeded model whose every parameter (norms and biases too) has a random value of its own."""
    config_class, model_class, traits = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SIZES, **traits, **overrides}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.train()


def tokens(rows: int, length: int, *, vocab_size: int = 97, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (rows, length), generator=generator)


def labels_for(input_ids: torch.Tensor) -> torch.Tensor:
    """Labels of which each row ignores another number, so that a mean of means would be wrong."""
    labels = input_ids.clone()
    for row in range(len(labels)):
        labels[row, : row % 5] = -100
    return labels
