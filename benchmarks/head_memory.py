"""Traces the peak memory of a step of models with a vocabulary of 128,256 words, on fake tensors."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.config import ParallelPlan
from meshwright.plan_text import parse_plan
from meshwright.tracing.trace import trace_step

SIZES = ((1024, 4, 1), (2048, 2, 1), (2048, 16, 1), (2048, 4, 4))  # hidden, layers, rows
PLANS = ("tp1", "tp1 recompute=full", "tp2+sp", "tp2+sp recompute=full")


def model_on_meta(hidden: int, layers: int, length: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=int(3.5 * hidden) // 128 * 128,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=8,
        vocab_size=128_256,
        tie_word_embeddings=True,
        max_position_embeddings=length,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


def main(length: Annotated[int, typer.Option(min=1, help="number of tokens per row (default: 8192)")] = 8192) -> None:
    """Print the peak of a step and what is held between steps, in GiB per rank, for bfloat16 models."""
    for hidden, layers, rows in SIZES:
        for words in PLANS:
            plan = ParallelPlan(**parse_plan(words))
            trace = trace_step(model_on_meta(hidden, layers, length), plan, rows=rows, length=length)
            peak, held = trace.peak / 2**30, (trace.parameters + trace.optimizer) / 2**30
            print(
                f"h{hidden}, {layers} layers, {rows} x {length}, {words}: peak {peak:.2f}, held {held:.2f}", flush=True
            )


if __name__ == "__main__":
    typer.run(main)
