"""Train over pipeline stages, and print what each rank computed, in order.

torchrun --nproc-per-node 4 -m examples.pipeline_train
torchrun --nproc-per-node 4 -m examples.pipeline_train --schedule interleaved --steps 5
python -m examples.pipeline_train

The model is a Llama of 8 layers that learns the bytes of this very file. One process trains the same model to the same
losses.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright.plan.schedule import SCHEDULES, rank_operations

LENGTH, ROWS, MICRO_BATCHES = 64, 8, 8
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def rows() -> list[dict[str, torch.Tensor]]:
    """Overlapping pieces of the text; the labels are the pieces themselves, which the model shifts."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    pieces = [text[start : start + LENGTH] for start in range(0, len(text) - LENGTH, LENGTH // 2)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def picture(plan: mw.ParallelPlan) -> str:
    """Return one line for each rank: its operations in order, with the stage if a rank has several."""
    lines = []
    for rank, operations in enumerate(rank_operations(plan.schedule, plan.pp, plan.stages_per_rank, MICRO_BATCHES)):
        words = [f"{op.kind.value}{op.micro_batch}" for op in operations]
        if plan.stages_per_rank > 1:
            words = [f"{op.stage}{word}" for op, word in zip(operations, words, strict=True)]
        lines.append(f"rank {rank}: {' '.join(words)}")
    return "\n".join(lines)


def main(steps: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES, **HEADS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(rows(), batch_size=ROWS, shuffle=True)

    world = int(os.environ.get("WORLD_SIZE", "1"))
    options = {"schedule": schedule, "gradient_accumulation_steps": MICRO_BATCHES} if world > 1 else {}
    plan = mw.ParallelPlan(pp=world, **options)
    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, plan=plan)

    is_first = int(os.environ.get("RANK", "0")) == 0
    if is_first and world > 1:
        print(f"{plan.label}: F forward, B backward, I gradient of the input, W gradient of the weights")
        print(picture(plan))
    step = 0
    while step < steps:
        for batch in loader:
            if len(batch["input_ids"]) % ROWS:
                continue  # too few rows are left at the end of the epoch
            loss = model(**batch).loss
            loss.backward()
            mw.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if is_first and (step % 5 == 0 or step == steps):
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
            if step == steps:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train over pipeline stages; see the text at the top of this file.")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default: 10)")
    parser.add_argument(
        "--schedule", choices=SCHEDULES, default="zb-h1", help="order of the operations (default: zb-h1)"
    )
    arguments = parser.parse_args()
    main(arguments.steps, arguments.schedule)
