"""Train a stock Qwen3-MoE with its experts spread over the ranks, and draw the load of each expert.

torchrun --nproc-per-node 2 -m examples.moe_train
torchrun --nproc-per-node 4 -m examples.moe_train --plan "dp2 tp2+sp ep4"
python -m examples.moe_train

The model has 8 experts per layer, of which each token takes 2, and learns the bytes of this very file. Its loss has
transformers' load-balancing loss. One process trains the same model to the same losses and the same loads.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import meshwright as mw

LENGTH, ROWS, BAR = 64, 8, 30
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "output_router_logits": True}


def rows() -> list[dict[str, torch.Tensor]]:
    """Overlapping pieces of the text; the labels are the pieces themselves, which the model shifts."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    pieces = [text[start : start + LENGTH] for start in range(0, len(text) - LENGTH, LENGTH // 2)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def picture(counts: dict[str, torch.Tensor]) -> str:
    """Return a bar for each expert of each layer, and how much fuller than the mean the fullest is."""
    lines = []
    for name, of_layer in counts.items():
        fullest, total = int(of_layer.max()), int(of_layer.sum())
        lines.append(
            f"{name}: {total} rows, the fullest expert has {fullest * len(of_layer) / total:.2f} times the mean"
        )
        lines += [f"  {expert} {'#' * round(BAR * int(n) / fullest)} {n}" for expert, n in enumerate(of_layer)]
    return "\n".join(lines)


def main(steps: int, plan: str | None) -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=256, **SIZES, **HEADS, **EXPERTS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(rows(), batch_size=ROWS, shuffle=True, drop_last=True)

    # Each rank reads its own rows and holds its own experts; every other weight is on every rank.
    world = int(os.environ.get("WORLD_SIZE", "1"))
    plan = plan or (f"dp{world} ep{world}" if world > 1 else "dp1")
    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, plan=plan)

    is_first = int(os.environ.get("RANK", "0")) == 0
    mw.expert_counts(model)  # count from now on
    step = 0
    while step < steps:
        for batch in loader:
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
    counts = mw.expert_counts(model)  # of the tokens of all ranks, so every rank makes the call
    if is_first:
        print(picture(counts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train experts over ranks; see the text at the top of this file.")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--plan", help="the plan in words (default: one share of the experts for each process)")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.plan)
