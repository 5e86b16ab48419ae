"""Tiny decoders in which tokens also meet in recurrences or convolutions, alone or beside attention."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

from support.models import SIZES, labels_for, tokens

LENGTH = 11
_SIZES: dict[str, Any] = {**SIZES, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**_SIZES, **_DELTA, "head_dim": 8, "linear_num_value_heads": 4, "rope_parameters": _ROTARY},
    "mamba2": {
        "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 16,
        "n_groups": 2, "expand": 2, "chunk_size": 8,
    },
    "bamba": {**_SIZES, **_MAMBA, "attn_layer_indices": [1], "mamba_expand": 2},
    "falcon_h1": {**_SIZES, **_MAMBA, "head_dim": 8, "mamba_d_ssm": 64},
    "lfm2": {**_SIZES, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "recurrent_gemma": {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "lru_width": 48, "attention_window_size": 8,
    },
    "olmo_hybrid": {**_SIZES, **_DELTA, "linear_num_value_heads": 2},
}  # fmt: skip

# Recurrences without a convolution, which stay whole.
RECURRENCES: dict[str, dict[str, Any]] = {
    "rwkv": {
        "vocab_size": 97, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 64,
    },
    "xlstm": {
        "vocab_size": 97, "hidden_size": 32, "num_blocks": 2, "num_hidden_layers": 2, "num_heads": 4,
    },
    "minimax": {
        **_SIZES, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2, "experts_implementation": "eager", "head_dim": 8,
    },
}  # fmt: skip


def from_config(name: str, **values: Any) -> Any:
    family, own = SHARED_BY_RANKS[name] if name in SHARED_BY_RANKS else (name, (FAMILIES | RECURRENCES)[name])
    return transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[family](**{**own, **values}))


def build(name: str) -> Any:
    """A seeded model, of a family or of ``SHARED_BY_RANKS``, of which every parameter has a random value of its own."""
    torch.manual_seed(0)
    model = from_config(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.double().train()


def loader(*, rows: int = 4, steps: int = 3) -> Any:
    ids = tokens(rows * steps, LENGTH)
    labels = labels_for(ids)
    return DataLoader([{"input_ids": ids[i], "labels": labels[i]} for i in range(len(ids))], batch_size=rows)


# Sizes that decide how the ranks of tp share a mixer: name -> family and the values of its config.
_ROUTED: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "eager",
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "linear_head_dim": 8, "linear_num_heads": 4, **_ROUTED,
}  # fmt: skip
_NEXT = {
    **_SIZES,
    **_DELTA,
    **_ROUTED,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 24,
}
_MAMBA1 = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
SHARED_BY_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta net, one key head": ("qwen3_5_text", {**FAMILIES["qwen3_5_text"], "linear_num_key_heads": 1}),
    "delta net, 3 heads": (
        "qwen3_5_text",
        {**FAMILIES["qwen3_5_text"], "linear_num_key_heads": 3, "linear_num_value_heads": 3},
    ),
    "delta net, rows by key head": ("qwen3_next", _NEXT),
    "delta net, rows by one key head": ("qwen3_next", {**_NEXT, "linear_num_key_heads": 1}),
    "delta attention": (
        "kimi_linear",
        {**_SIZES, **_LATENT, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "delta attention with a whole gate": (
        "bailing_hybrid",
        {**_SIZES, **_LATENT, "layer_group_size": 2, "q_lora_rank": None, "n_group": 2, "topk_group": 1},
    ),
    "mamba2, one group": ("mamba2", {**FAMILIES["mamba2"], "n_groups": 1}),
    "mamba2, biases": ("mamba2", {**FAMILIES["mamba2"], "use_bias": True}),
    "falcon_h1, norm of one group": (
        "falcon_h1",
        {**FAMILIES["falcon_h1"], "mamba_rms_norm": True, "mamba_n_groups": 1, "mamba_norm_before_gate": False},
    ),
    "falcon_h1, norm before the gate": (
        "falcon_h1",
        {**FAMILIES["falcon_h1"], "mamba_rms_norm": True, "mamba_norm_before_gate": True},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_SIZES, **_MAMBA, "mamba_n_groups": 1, "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0, "shared_intermediate_size": 48,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_SIZES, "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "mamba_num_heads": 8, "head_dim": 8,
            "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8,
        },
    ),
    "mamba": ("mamba", _MAMBA1),
    "falcon_mamba": ("falcon_mamba", _MAMBA1),
    "jamba": (
        "jamba",
        {
            **_SIZES, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 4,
            "mamba_d_state": 4, "mamba_expand": 2, "experts_implementation": "eager",
        },
    ),
    "lfm2, biases": ("lfm2", {**FAMILIES["lfm2"], "conv_bias": True}),
}  # fmt: skip
