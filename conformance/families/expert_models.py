"""Tiny models of transformers' causal-LM types with experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conformance.families import models
from conformance.families.models import LATENT, WINDOW

# The names that the sizes of experts have in the types' configs; a config gets those that it knows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "router_topk"), 2),
    **dict.fromkeys(("moe_k", "moe_topk", "moe_top_k", "top_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_shared_intermediate_size"), 24),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "num_expert_groups"), 2),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "topk_group": 1,
    "moe_layer_start_index": 0,
    "zero_expert_num": 2,
    "decoder_sparse_step": 1,
    "intermediate_size_mlp": 48,
}
_LATENT = {**{key: value for key, value in LATENT.items() if key != "attention_bias"}, "head_dim": 4}
_INDEXED = {**_LATENT, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8}
_LINEAR = {
    "layer_types": ["full_attention", "linear_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_RELATIVE = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 5,
    "d_rel": 4,
    "rel_extent": 16,
}
_FULL = {"layer_types": ["full_attention", "full_attention"]}

# Types with experts: model type -> the values of its tiny config besides the sizes.
EXPERTS: dict[str, dict[str, Any]] = {
    "afmoe": WINDOW,
    "aria_text": {},
    "axk1": _LATENT,
    "axk2": _INDEXED,
    "bailing_hybrid": {},
    "beam": {**WINDOW, "mlp_layer_types": ["dense", "sparse"]},
    "cohere2_moe": {},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": 16,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_jitter_eps": None,
            "moe_loss_weight": 0.01,
        },
    },
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _INDEXED,
    "deepseek_v4": {
        "q_lora_rank": 12,
        "o_lora_rank": 8,
        "o_groups": 2,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 8,
    },
    "doge": {"is_moe": True},
    "dots1": _FULL,
    "dots3_note_text": _INDEXED,
    "ernie4_5_moe": {"moe_layer_end_index": 1},
    "exaone_moe": {**WINDOW, **_FULL, "is_moe_layer": [False, True]},
    "flex_olmo": {},
    "flint": {**WINDOW, "mlp_only_layers": [0]},
    "gemma4_text": {
        **WINDOW,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
    },
    "glm4_moe": {},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _INDEXED,
    "gpt_oss": {**WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {"layer_types": ["attention", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": _INDEXED,
    "inkling2_text": _RELATIVE,
    "inkling_text": _RELATIVE,
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_expand": 2,
    },
    "jetmoe": {"kv_channels": 8},
    "kimi_linear": {
        **_LATENT,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "kolibri1": {},
    "laguna": {},
    "lfm2_moe": _FULL,
    "llama4_text": {
        "interleave_moe_layer_step": 1,
        "moe_layers": [0, 1],
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 16,
        "num_experts_per_tok": 1,
    },
    "longcat_flash": {**_LATENT, "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 48},
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax": {"layer_types": ["full_attention", "linear_attention"], "block_size": 8},
    "minimax_m2": {"rotary_dim": 4},
    "minimax_m3_vl_text": {},
    "mixtral": {},
    "nemotron_h": {
        "layers_block_type": ["attention", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 4,
        "moe_latent_size": None,
    },
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_moe": {},
    "qwen3_next": _LINEAR,
    "qwen4_exp_text": {
        **_LINEAR,
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "solar_open": {},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 12},
}

# The seeds with which each expert gets tokens of the rows that are compared; 0 for the other types.
_SEEDS = {"afmoe": 1, "ernie4_5_moe": 2, "gpt_oss": 1}
# Their routers draw random numbers in training, so they are compared in evaluation mode.
DRAWS = frozenset({"phimoe"})


def build(model_type: str, **overrides: Any) -> nn.Module:
    """Return a seeded float64 model whose parameters and routing biases are all random."""
    fields = models.known_fields(model_type, SIZES) | EXPERTS[model_type] | overrides
    # torch's grouped matrix multiplication has no float64.
    fields = {"experts_implementation": "eager", **fields}
    model = models.build(model_type, seed=_SEEDS.get(model_type, 0), **fields)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith(("bias", "biases")):  # corrects which experts are chosen
            buffer.add_(torch.randn(buffer.shape, generator=generator, dtype=buffer.dtype) * 0.1)
        elif name.endswith("tid2eid"):  # the experts of each token of the vocabulary
            words, slots = buffer.shape
            buffer.copy_(torch.rand(words, SIZES["n_routed_experts"], generator=generator).argsort()[:, :slots])
    return model.eval() if model_type in DRAWS else model
