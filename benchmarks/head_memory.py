"""Traces the peak memory of a step with head and loss in chunks and with whole logits, on fake tensors."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.plan.config import ParallelPlan
from meshwright.plan.text import parse_plan
from meshwright_tools.tracing.trace import Trace, trace_step

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


def traced(model: LlamaForCausalLM, plan: ParallelPlan, rows: int, length: int, *, is_whole: bool) -> Trace:
    """Trace a step, with the logits of all tokens in memory if ``is_whole``."""
    if is_whole:
        model.lm_head.register_forward_hook(_nothing)  # a program's hook on the head keeps the logits whole
    return trace_step(model, plan, rows=rows, length=length)


def _nothing(*_: object) -> None:
    pass


def main(length: Annotated[int, typer.Option(min=1, help="number of tokens per row (default: 8192)")] = 8192) -> None:
    """Print the peaks of a step, and what is held between steps, in GiB per rank, for bfloat16 models."""
    for hidden, layers, rows in SIZES:
        for words in PLANS:
            plan = ParallelPlan(**parse_plan(words))
            whole, chunked = (
                traced(model_on_meta(hidden, layers, length), plan, rows, length, is_whole=is_whole)
                for is_whole in (True, False)
            )
            held = (chunked.parameters + chunked.optimizer) / 2**30
            print(
                f"h{hidden}, {layers} layers, {rows} x {length}, {words}: whole logits {whole.peak / 2**30:.2f}, "
                f"in chunks {chunked.peak / 2**30:.2f}, ratio {chunked.peak / whole.peak:.2f}, held {held:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
