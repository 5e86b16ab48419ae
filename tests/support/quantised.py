"""Small models whose bases bitsandbytes has quantised, with adapters, loaded as users load them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import bitsandbytes
import bitsandbytes.functional
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import BitsAndBytesConfig

from support.exact import Float64
from support.models import build

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nf4, double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4 in bfloat16": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "8 bits": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}


def wide_matmul_4bit(x: Tensor, weight: Tensor, quant_state: Any, bias: Tensor | None = None) -> Tensor:
    """What ``bitsandbytes.matmul_4bit`` computes, with the same values of the weight, but in the dtype of ``x``."""
    values = bitsandbytes.functional.dequantize_4bit(weight, quant_state)
    return F.linear(x, values.to(x.dtype), bias)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Make quantised models compute in float64, so that only the order of sums differs between plans."""
    with Float64(), mock.patch.object(bitsandbytes, "matmul_4bit", wide_matmul_4bit):
        yield


def double(model: Any) -> Any:
    """Convert what is not quantised in a model to float64, and let its layers take float64."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and not hasattr(tensor, "quant_state"):
            tensor.data = tensor.data.double()
    for module in model.modules():
        if hasattr(module, "compute_type_is_set"):
            module.compute_dtype, module.compute_type_is_set = None, True
    return model


def quantised(kind: str = "nf4, double", family: str = "llama", **sizes: Any) -> Any:
    """A model that transformers has quantised while it loaded the weights."""
    plain: Any = build(family, **{**WIDE, **sizes})
    options = {"config": plain.config, "state_dict": plain.state_dict(), "dtype": torch.float32}
    model = type(plain).from_pretrained(None, quantization_config=BitsAndBytesConfig(**KINDS[kind]), **options)
    for module in model.modules():
        module.support_avx512bf16_for_cpu = False  # otherwise this CPU evaluates with rounded weights
    return model


def adapted(kind: str = "nf4, double", family: str = "llama", **sizes: Any) -> Any:
    """The same with adapters of all projections, which are all at work."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    model = quantised(kind, family, **sizes)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    torch.manual_seed(3)
    model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model.train()
