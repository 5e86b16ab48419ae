"""A decoder written by hand: no transformers config, a head that is a bare matrix, and a loss of its own."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, HIDDEN, INTERMEDIATE, HEADS, LAYERS, LENGTH = 96, 32, 64, 4, 2, 12


class RotaryEmbedding(nn.Module):
    def __init__(self, dim: int, max_position_embeddings: int, base: float = 10000.0):
        super().__init__()
        inverse = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.outer(torch.arange(max_position_embeddings, dtype=torch.float64), inverse)
        angles = torch.cat([angles, angles], dim=-1)
        self.cos_cached, self.sin_cached = angles.cos()[None, :, None, :], angles.sin()[None, :, None, :]

    def forward(self, x: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        return self.cos_cached[:, :seq_len].to(x), self.sin_cached[:, :seq_len].to(x)


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.head_dim = HIDDEN, HEADS, HIDDEN // HEADS
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.rotary_emb = RotaryEmbedding(self.head_dim, LENGTH)

    def forward(self, hidden_states: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        batch = hidden_states.shape[0]
        q, k, v = (
            project(hidden_states).reshape(batch, -1, self.num_heads, self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (x.squeeze(2).squeeze(0)[position_ids].unsqueeze(2) for x in self.rotary_emb(v, q.shape[1]))
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q / math.sqrt(self.head_dim) @ k.transpose(-1, -2) + attention_mask
        out = (scores.softmax(-1) @ v).transpose(1, 2)
        return self.o_proj(out.reshape(batch, -1, self.head_dim * self.num_heads))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.input_layernorm, self.post_attn_layernorm = RMSNorm(), RMSNorm()

    def forward(self, x: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), position_ids, attention_mask)
        return x + self.mlp(self.post_attn_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers, norm, and a [hidden, vocabulary] matrix for a head; the loss is the mean over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([DecoderLayer() for _ in range(LAYERS)])
        self.norm = RMSNorm()
        self.weight = nn.Parameter(torch.empty(HIDDEN, VOCAB).normal_(std=HIDDEN**-0.5))
        self.loss_func = nn.CrossEntropyLoss(reduction="none", ignore_index=-100)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, labels: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        batch, length = input_ids.shape
        hidden = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device).expand(batch, length)
        mask = torch.full((length, length), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu(1)[None, None]
        for layer in self.layers:
            hidden = layer(hidden, position_ids, mask)
        logits = self.norm(hidden) @ self.weight
        if labels is None:
            return None, logits
        losses = self.loss_func(logits.flatten(0, 1), labels.flatten())
        counted = (losses > 0).to(losses)
        return (losses * counted).sum() / counted.sum(), logits


def make_decoder(seed: int = 0) -> Any:
    """A seeded decoder in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder().to(torch.float64)
