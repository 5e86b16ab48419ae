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


def build(family: str) -> Any:
    """A seeded model of which every parameter has a random value of its own."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[family](**FAMILIES[family]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.double().train()


def loader(*, rows: int = 4, steps: int = 3) -> Any:
    ids = tokens(rows * steps, LENGTH)
    labels = labels_for(ids)
    return DataLoader([{"input_ids": ids[i], "labels": labels[i]} for i in range(len(ids))], batch_size=rows)
