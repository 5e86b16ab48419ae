"""Parts of Llama in plain formulas, put where ``apply_liger_kernel_to_llama`` of liger_kernel puts its kernels.

It replaces names in transformers' module, from which a model's later calls and later models get their functions and
classes, and binds methods to the modules of a model that is there already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import MethodType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

_HOME = "liger_kernel.transformers.plain"


class Norm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.variance_epsilon, self.offset = nn.Parameter(torch.ones(hidden_size)), eps, 0.0

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return hidden_states * scale * (self.weight + self.offset)


class Mlp(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """Rotate by complex numbers, whose parts are the halves of a head."""
    turn = torch.complex(cos, sin)[:, None, :, : cos.shape[-1] // 2]

    def turned(x: Tensor) -> Tensor:
        result = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([result.real, result.imag], -1)

    return turned(q), turned(k)


for _part in (Norm, Mlp, rotated):
    _part.__module__ = _HOME


@contextlib.contextmanager
def in_the_module() -> Iterator[None]:
    """Replace the names in transformers' module inside the context."""
    parts = {"LlamaRMSNorm": Norm, "LlamaMLP": Mlp, "apply_rotary_pos_emb": rotated}
    with mock.patch.multiple(modeling_llama, **parts):
        yield


def in_the_instances(model: Any) -> None:
    """Bind the methods to the modules of a model."""
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.offset = 0.0
            _bind(module, Norm)
        elif type(module).__name__ == "LlamaMLP":
            _bind(module, Mlp)


def _bind(module: nn.Module, part: type[nn.Module]) -> None:
    methods = {"forward": part.forward, "_get_name": lambda self: f"Liger{part.__name__}"}
    vars(module).update({name: MethodType(method, module) for name, method in methods.items()})
