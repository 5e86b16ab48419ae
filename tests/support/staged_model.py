"""A small Llama in stages, its plan and its rows, for the tests that count what a step of a pipeline costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import meshwright as mw


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A Llama with one head for each 32 channels, and the rows of a step.

    Args:
        layers: decoder layers.
        hidden: width.
        vocabulary: number of tokens.
        length: tokens of a row.
        micro_batches: micro-batches of a step, each of one row.
    """

    layers: int = 8
    hidden: int = 64
    vocabulary: int = 128
    length: int = 32
    micro_batches: int = 8

    @property
    def message_bytes(self) -> int:
        """The bytes of a micro-batch's hidden states in float32."""
        return self.length * self.hidden * 4

    def model(self) -> Any:
        """Return the model, with the same weights in every call and on every rank."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=11 * self.hidden // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 32,
            num_key_value_heads=self.hidden // 32,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.length,
            use_cache=False,
        )
        return LlamaForCausalLM(config).train()

    def batch(self) -> dict[str, Tensor]:
        """Return the rows of a step."""
        shape = (self.micro_batches, self.length)
        ids = torch.randint(self.vocabulary, shape, generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids, "labels": ids}

    def plan(self, schedule: str, stages: int) -> mw.ParallelPlan:
        """Return the plan of a schedule over ``stages`` ranks."""
        return mw.ParallelPlan(pp=stages, schedule=schedule, micro_batch_size=1)  # type: ignore[arg-type]

    def distributed(self, schedule: str, stages: int) -> Any:
        """Return the model under the plan of a schedule."""
        return mw.to_distributed(self.model(), plan=self.plan(schedule, stages))[0]
