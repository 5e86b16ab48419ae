"""Train with DeepSpeed's ZeRO-3 over tensor and sequence parallelism, from the DeepSpeed JSON beside this file.

    torchrun --nproc-per-node 4 -m examples.deepspeed_zero3 --tp 2

The loop is DeepSpeed's. ``initialize`` and ``save_pretrained`` come from meshwright_hf, and ``initialize`` takes a
plan. The program prints the loss and the gradient norm of each step, and saves a DeepSpeed checkpoint and one-device
files for ``from_pretrained``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright_hf.deepspeed import initialize, save_pretrained

CONFIG = Path(__file__).with_suffix(".json")
ROWS = 4  # rows per micro-batch, over all dp ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size (default: 2); dp is processes / tp")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("runs/deepspeed_zero3"))
    options = parser.parse_args()
    torch.manual_seed(0)

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    text = torch.randint(8, (64 * ROWS, 32))  # only 8 different tokens, so that the model can learn something
    loader = DataLoader([{"input_ids": row, "labels": row} for row in text], batch_size=ROWS)

    world = int(os.environ.get("WORLD_SIZE", "1"))
    plan = mw.ParallelPlan(dp=max(1, world // options.tp), tp=options.tp, sequence_parallel=options.tp > 1)
    engine, _, loader, _ = initialize(model=model, config=CONFIG, dataloader=loader, plan=plan)

    batches = iter(loader)
    for step in range(options.steps):
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(**next(batches)).loss
            engine.backward(loss)
            engine.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {engine.get_global_grad_norm():.4f}")

    engine.save_checkpoint(str(options.output / "checkpoint"))
    save_pretrained(engine, options.output / "model")
    if dist.get_rank() == 0:
        print(f"wrote {options.output}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
