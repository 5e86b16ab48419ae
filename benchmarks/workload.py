"""The model and the batch that every contender trains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A Llama of about 45 M parameters in float32 and a fixed batch of tokens."""

    hidden_size: int = 512
    intermediate_size: int = 1408
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    vocab_size: int = 32000
    batch_size: int = 4
    sequence_length: int = 512
    learning_rate: float = 1e-3
    seed: int = 0

    def model(self) -> nn.Module:
        """Return a new ``LlamaForCausalLM`` with the same weights in every call and on every rank."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(self.seed)
        config = LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.sequence_length,
            use_cache=False,
        )
        return LlamaForCausalLM(config).train()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        """Return AdamW with torch's defaults, since fused and foreach crash on stock transformers' mixed parameters."""
        return torch.optim.AdamW(parameters, lr=self.learning_rate)

    def rows(self) -> list[dict[str, Tensor]]:
        """Return the rows of the global batch, each ``[sequence_length]`` token ids that are also the labels."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch_size, self.sequence_length)
        tokens = torch.randint(self.vocab_size, shape, generator=generator)
        return [{"input_ids": row, "labels": row} for row in tokens]

    def batch(self, *, part: int = 0, parts: int = 1) -> dict[str, Tensor]:
        """Return one of ``parts`` equal slices of the global batch, ``[batch_size / parts, sequence_length]``."""
        if self.batch_size % parts:
            raise ValueError(f"batch_size {self.batch_size} is not divisible by {parts} parts")
        size = self.batch_size // parts
        rows = self.rows()[part * size : (part + 1) * size]
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
