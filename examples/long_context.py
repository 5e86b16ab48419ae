"""Train on one packed row of 32,768 tokens, under a memory limit for each process.

torchrun --nproc-per-node 4 -m examples.long_context
torchrun --nproc-per-node 4 -m examples.long_context --context ring --steps 5
python -m examples.long_context

The model is a small Llama that learns the bytes of Meshwright's source files, packed into one row; the tokens of a file
attend to that file only. With four processes each holds a quarter of the row. One process holds all of it and exceeds
the limit.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def packed_row(length: int) -> dict[str, torch.Tensor]:
    """Return one row of whole documents, whose positions begin anew with each document."""
    tokens: list[int] = []
    positions: list[int] = []
    texts = sorted(Path(mw.__file__).parent.rglob("*.py"))
    while len(tokens) < length:
        for text in texts:
            document = list(text.read_bytes())[:1024]
            tokens += document
            positions += range(len(document))
    row = torch.tensor([tokens[:length]])
    labels = row.clone()
    labels[0, [i for i in range(length) if positions[i] == 0]] = -100  # no document predicts the next one
    return {"input_ids": row, "labels": labels, "position_ids": torch.tensor([positions[:length]])}


def limit_memory(megabytes: int) -> None:
    """Limit the memory that this process may allocate from now on; this works on Linux only."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit = int(status["VmData"].split()[0]) * 1024 + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main(steps: int, context: str, length: int, limit_mb: int) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=length, **SIZES, **HEADS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    plan = mw.ParallelPlan(cp=world, context=context)  # type: ignore[arg-type]
    model, optimizer, _ = mw.to_distributed(model, optimizer, plan=plan)

    batch = packed_row(length)
    if limit_mb:
        limit_memory(limit_mb)
    for step in range(1, steps + 1):
        start = time.perf_counter()
        try:
            loss = model(**batch).loss
            loss.backward()
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            raise SystemExit(f"a row of {length} tokens on {world} process(es) does not fit in {limit_mb} MB") from None
        mw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if int(os.environ.get("RANK", "0")) == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            seconds = time.perf_counter() - start
            print(f"step {step}: loss {loss.item():.4f}, {seconds:.1f} s, peak memory {peak:.0f} MB", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on one long row; see the text at the top of this file.")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default: 3)")
    parser.add_argument(
        "--context", choices=("gather", "ulysses", "ring"), default="gather", help="method (default: gather)"
    )
    parser.add_argument("--length", type=int, default=32768, help="tokens in the row (default: 32768)")
    parser.add_argument(
        "--limit-mb", type=int, default=1000, help="MB that each process may allocate; 0 for no limit (default: 1000)"
    )
    arguments = parser.parse_args()
    main(arguments.steps, arguments.context, arguments.length, arguments.limit_mb)
