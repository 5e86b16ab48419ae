"""Files of small models in published quantised forms, as transformers reads them into plain weights on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

BLOCK = 16
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}


def in_fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    made = {}
    for name, x in tensors.items():
        made[name] = x
        if x.ndim == 2 and not any(part in name for part in ("embed", "lm_head", "gate.weight")):
            tiles = x.float().view(len(x) // BLOCK, BLOCK, -1, BLOCK)
            scale = tiles.abs().amax((1, 3)) / 448
            made[name] = (tiles / scale[:, None, :, None]).view(x.shape).to(torch.float8_e4m3fn)
            made[f"{name}_scale_inv"] = scale
    return made


def in_mxfp4(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    made = {}
    for name, x in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = x.shape
            made[f"{name}_blocks"] = torch.randint(256, (experts, outer, inner // 32, 16)).to(torch.uint8)
            made[f"{name}_scales"] = torch.full((experts, outer, inner // 32), 122, dtype=torch.uint8)
        else:
            made[name] = x
    return made


Form = tuple[Any, Any, Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Any]]
FORMS: dict[str, Form] = {
    "mxfp4": (GptOssForCausalLM, GptOssConfig(**SIZES, head_dim=16, num_local_experts=4), in_mxfp4, MXFP4),
    "fp8": (LlamaForCausalLM, LlamaConfig(**SIZES), in_fp8, FP8),
    "fp8, experts": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=4), in_fp8, FP8),
}


def write_quantised(form: str, folder: Path) -> Any:
    """Write the files of a model in a form, and return the class of the model."""
    model_class, config, quantise, quantization = FORMS[form]
    torch.manual_seed(0)
    model_class(config).to(torch.bfloat16).save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(quantise(load_file(path)), path, metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**text, "quantization_config": quantization}))
    return model_class
