"""A decoder layer like those of transformers, without a dependency on transformers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the root-mean-square norm of x, computed in 32 bits."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with rotary position embeddings."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class _Norm(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight)


class DecoderLayer(nn.Module):
    """Attention with rotary position embeddings and a gated MLP, each with a norm before it and a residual connection.

    Args:
        hidden: width of the residual stream.
        ffn: width of the MLP.
        head_dim: width of one head.
    """

    def __init__(self, hidden: int, ffn: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.before_attention, self.before_mlp = _Norm(hidden), _Norm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's output for x [batch, length, hidden] and cos, sin [length, head_dim]."""
        y = self.before_attention(x)
        q, k, v = (
            project(y).view(*y.shape[:2], -1, self.head_dim).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(*x.shape))
        y = self.before_mlp(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result
