"""Compiled layers against eager ones, in alternate steps of one run.

torchrun --nproc-per-node 2 -m benchmarks.compiled_layers --plan tp2+sp
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw


def trainer(plan: str, *, layers: int, width: int, **options: Any) -> tuple[Any, Any]:
    """Return a distributed model and its optimizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "vocab_size": 1000}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4))  # type: ignore[arg-type]
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, _ = mw.to_distributed(model, optimizer, config=mw.ToDistributedConfig(plan=plan, **options))
    return model, optimizer


def seconds(model: Any, optimizer: Any, ids: torch.Tensor) -> float:
    """Return the time of one step."""
    start = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="tp2+sp", help="the plan in words (default: tp2+sp)")
    parser.add_argument("--layers", type=int, default=4, help="number of layers (default: 4)")
    parser.add_argument("--width", type=int, default=256, help="hidden size (default: 256)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens in each of 2 rows (default: 512)")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of steps (default: 15)")
    options = parser.parse_args()
    sizes = {"layers": options.layers, "width": options.width}
    ids = torch.randint(0, 1000, (2, options.tokens), generator=torch.Generator().manual_seed(0))
    eager, compiled = trainer(options.plan, **sizes), trainer(options.plan, **sizes, compile="layers")
    start = time.perf_counter()
    seconds(*compiled, ids)
    first = time.perf_counter() - start
    seconds(*eager, ids)
    ratios = []
    for index in range(options.rounds):
        pair = [eager, compiled] if index % 2 == 0 else [compiled, eager]
        times = [seconds(*each, ids) for each in pair]
        ratios.append(times[0] / times[1] if index % 2 == 0 else times[1] / times[0])
    low, middle, high = statistics.quantiles(ratios, n=4)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{options.plan}: compiled in {first:.0f} s; eager takes {middle:.2f} times as long as compiled")
        print(f"(median of {options.rounds} pairs; the middle half lies from {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
