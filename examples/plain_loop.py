"""A plain training loop, made parallel by one call; kill it, run it with any number of processes, and it goes on.

torchrun --nproc-per-node 2 -m examples.plain_loop
python -m examples.plain_loop --steps 40

The model is a Llama of 70,000 parameters that learns the bytes of this very file.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw

LENGTH, ROWS = 64, 8
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def rows() -> list[dict[str, torch.Tensor]]:
    """Overlapping pieces of the text; the labels are the pieces themselves, which the model shifts."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    pieces = [text[start : start + LENGTH] for start in range(0, len(text) - LENGTH, LENGTH // 2)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main(steps: int, folder: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES, **HEADS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(rows(), batch_size=ROWS, shuffle=True)

    # Two processes share every layer; more of them share the batch.
    world = int(os.environ.get("WORLD_SIZE", "1"))
    tp = 2 if world % 2 == 0 else 1
    plan = mw.ParallelPlan(tp=tp, dp=world // tp, sequence_parallel=tp > 1, zero_stage=1)
    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=mw.ToDistributedConfig(plan=plan))
    saved = mw.load_checkpoint(folder, model, optimizer, loader=loader, missing_ok=True)  # the newest whole one
    step = 0 if saved is None else saved.step

    is_first = int(os.environ.get("RANK", "0")) == 0
    while step < steps:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            mw.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0 or step == steps:
                mw.save_checkpoint(folder / f"step-{step}", model, optimizer, loader=loader, step=step, keep=2)
                if is_first:
                    print(f"step {step}: loss {loss.item():.4f}", flush=True)
            if step == steps:
                break

    model.save_pretrained(folder / "model")  # one-device files, for from_pretrained


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="train until this step")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/plain_loop"), help="the checkpoints, and the model at the end"
    )
    main(**vars(parser.parse_args()))
