"""Tiny models of transformers' causal-LM families, with traits that a default config would leave out."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# A vocabulary of 97 is not divisible by 2, so the last shard always has padding.
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "tie_word_embeddings": False,
}
# The names of the sizes in decoders of encoder-decoder families.
DECODER: dict[str, Any] = {
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "is_decoder": True,
    "is_encoder_decoder": False,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "attention_bias": True,
}
WINDOW = {"sliding_window": 5}

# Dense decoders: model type -> the values of its tiny config besides SIZES.
DENSE: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": BIASES,
    "bart": DECODER,
    "bigbird_pegasus": DECODER,
    "biogpt": {},
    "bitnet": {},
    "blenderbot": DECODER,
    "blenderbot-small": DECODER,
    "bloom": {},
    "codegen": {"num_attention_heads": 8, "rotary_dim": 4},
    "cohere": {"attention_bias": True},
    "cohere2": WINDOW,
    "cohere_compass_text": {
        **WINDOW,
        "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "ctrl": {"dff": 48, "n_positions": 64},
    "cwm": WINDOW,
    "ernie4_5": {"use_bias": True},
    "exaone4": WINDOW,
    "falcon": {"alibi": True, "new_decoder_architecture": False, "multi_query": True, "bias": True},
    "gemma": {"attention_bias": True},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 8, "attn_implementation": "eager"},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 8},
    "gemma4_text": {**WINDOW, "global_head_dim": 16, "hidden_size_per_layer_input": 0},
    "gemma4_unified_text": {**WINDOW, "global_head_dim": 16},
    "glm": {"attention_bias": True},
    "glm4": {"attention_bias": True},
    "gpt-sw3": {},
    "gpt2": {},
    "gpt_bigcode": {"multi_query": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gptj": {"rotary_dim": 4},
    "granite": {**BIASES, "logits_scaling": 3.0},
    "granite_swa": WINDOW,
    "helium": BIASES,
    "hunyuan_v1_dense": {},
    "hyperclovax": {},
    "internlm3": BIASES,
    "iquestcoder": BIASES,
    "jais2": BIASES,
    "lfm2": {"layer_types": ["full_attention", "full_attention"], "block_auto_adjust_ff_dim": False},
    "llama": BIASES,
    "marian": DECODER,
    "mbart": DECODER,
    "minicpm3": LATENT,
    "ministral": WINDOW,
    "ministral3": {},
    "mistral": WINDOW,
    "modernbert-decoder": {**BIASES, "norm_bias": True, "local_attention": 6},
    "moshi": {"ffn_dim": 96, **WINDOW},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "mvp": DECODER,
    "nanochat": {},
    "nemotron": BIASES,
    "olmo": BIASES,
    "olmo2": {},
    "olmo3": WINDOW,
    "openai-gpt": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "pegasus": DECODER,
    "persimmon": {},
    "phi": {"qk_layernorm": True},
    "phi3": {},
    "plbart": DECODER,
    "qwen2": {},
    "qwen3": {},
    "seed_oss": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "smollm3": BIASES,
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": WINDOW,
    "vaultgemma": {**WINDOW, "query_pre_attn_scalar": 8},
    "whisper": {**DECODER, "max_target_positions": 64},
    "youtu": {**LATENT, "head_dim": 4},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
}


def model_types() -> list[str]:
    """Return every model type that transformers' AutoModelForCausalLM can make."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def model_class(model_type: str) -> type:
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]


def tiny_config(model_type: str, **overrides: Any) -> PretrainedConfig:
    """Return a config of two layers and four heads, without dropout."""
    config_class = CONFIG_MAPPING[model_type]
    sizes = known_fields(model_type, SIZES)
    if model_type == "falcon":  # Falcon computes it
        sizes.pop("head_dim", None)
    config = config_class(**{**sizes, **DENSE.get(model_type, {}), **overrides})
    for owner in (config, *(v for v in vars(config).values() if isinstance(v, PretrainedConfig))):
        for key, value in vars(owner).items():
            if ("drop" in key) and isinstance(value, float):
                setattr(owner, key, 0.0)
    return config


def known_fields(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return those of ``fields`` that a family's config has."""
    known = _default(model_type)
    return {key: value for key, value in fields.items() if _has(known, key)}


@functools.cache
def _default(model_type: str) -> PretrainedConfig:
    return CONFIG_MAPPING[model_type]()


def _has(config: PretrainedConfig, key: str) -> bool:
    try:
        return hasattr(config, key)
    except Exception:  # a per-layer attribute has no single value
        return True


def build(model_type: str, *, seed: int = 0, **overrides: Any) -> nn.Module:
    """Return a seeded float64 model whose parameters are all random, since zeros and equal heads would hide faults."""
    torch.manual_seed(seed)  # a vector keeps the value of its initialisation below the noise
    model = model_class(model_type)(tiny_config(model_type, **overrides)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if parameter.ndim > 1:
                parameter.copy_(noise * 0.2)
            else:
                parameter.add_(noise * 0.3)
    return model.train()
