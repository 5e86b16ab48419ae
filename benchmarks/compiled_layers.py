"""Compiled layers against eager ones: paired steps in one run, in a random order within each pair.

torchrun --nproc-per-node 2 -m benchmarks.compiled_layers
torchrun --nproc-per-node 1 -m benchmarks.compiled_layers --plan dp1

Every plan's line has the median of compiled / eager step times, with the 95 % interval of the median. Below 1, compiled
layers are faster. The losses of both models are compared first.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from benchmarks.summary import Ratio

WARM_UP = 3  # steps: the first compiles, and after the optimizer's first step memory is allocated anew
LOSS_TOLERANCE = 1e-4  # relative; float32 sums in another order stay well below it over the warm-up


class Model:
    """A distributed model and its optimizer, which train on one batch."""

    def __init__(self, plan: str, ids: torch.Tensor, *, layers: int, width: int, **options: Any):
        torch.manual_seed(0)
        sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "vocab_size": 1000}
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4))  # type: ignore[arg-type]
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
        config = mw.ToDistributedConfig(plan=plan, **options)
        loader = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=len(ids))  # type: ignore[arg-type]
        self.model, self.optimizer, loader = mw.to_distributed(model, optimizer, loader, config=config)
        self.batch = next(iter(loader))

    def step(self) -> float:
        """Train for a step, and return the loss."""
        loss = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def seconds(self) -> float:
        """Return the time of a step, from when all ranks are ready until all are done."""
        _meet()
        start = time.perf_counter()
        self.step()
        _meet()
        return time.perf_counter() - start


def compare(plan: str, *, tokens: int, rounds: int, **sizes: int) -> str:
    """Time an eager and a compiled model under a plan, and return a line with the result.

    Args:
        plan: the plan in words.
        tokens: the number of tokens in each of 2 rows.
        rounds: the number of pairs of steps.
        sizes: the arguments of ``Model``.

    Raises:
        RuntimeError: if the losses differ.
    """
    ids = torch.randint(0, 1000, (2, tokens), generator=torch.Generator().manual_seed(0))
    eager, compiled = Model(plan, ids, **sizes), Model(plan, ids, **sizes, compile="layers")
    start = time.perf_counter()
    losses = [compiled.step()]
    first = time.perf_counter() - start
    losses += [compiled.step() for _ in range(WARM_UP - 1)]
    for loss, expected in zip(losses, [eager.step() for _ in range(WARM_UP)], strict=True):
        if not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected):
            raise RuntimeError(f"{plan}: loss {loss:.6f} of compiled layers, but {expected:.6f} of eager ones")
    draw, pairs = random.Random(0), []  # the same order on every rank
    gc.disable()
    for _ in range(rounds):
        gc.collect()
        order = draw.sample([eager, compiled], 2)
        times = {id(model): model.seconds() for model in order}
        pairs.append((times[id(compiled)], times[id(eager)]))
    gc.enable()
    ratio = Ratio.of([c / e for c, e in pairs])
    seconds = statistics.median(e for _, e in pairs)
    return (
        f"{plan}: compiled / eager {ratio} in {rounds} rounds; an eager step takes {seconds:.3f} s, the first compiled "
        f"one {first:.0f} s"
    )


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--plan", nargs="+", default=["tp2+sp", "cp2", "dp2"], help="plans in words (default: tp2+sp cp2 dp2)"
    )
    parser.add_argument("--layers", type=int, default=4, help="number of layers (default: 4)")
    parser.add_argument("--width", type=int, default=256, help="hidden size (default: 256)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens in each of 2 rows (default: 512)")
    parser.add_argument("--rounds", type=int, default=30, help="pairs of steps (default: 30)")
    options = parser.parse_args()
    for plan in options.plan:
        sizes = {"layers": options.layers, "width": options.width}
        line = compare(plan, tokens=options.tokens, rounds=options.rounds, **sizes)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(line, flush=True)


if __name__ == "__main__":
    main()
