"""Measures what a plan costs the host: CPU time per layer above the stock model, in forward and in backward.

A GPU works through a large layer in 5 to 20 ms. A host that needs longer to start the layer's kernels makes it wait.
Here the model is narrow and deep and the process group is fake, so that almost all of a step is Python. Steps of the
stock model and of the plan alternate; the thread's CPU time is measured, not the wall time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.construct.initial_weights import InitialWeights
from meshwright.distribute import installation
from meshwright.distribute.decide import build_on_fake_rank
from meshwright.faults import interpose
from meshwright.faults.collective_log import CallTrace, describe
from meshwright.plan.config import ParallelPlan
from meshwright.plan.text import parse_plan
from meshwright_tools.tracing.trace import fake_world

PLANS = ("dp4", "dp4 zero1", "dp4 zero3", "tp4", "tp4+sp", "dp2 tp2+sp zero3")
IDS = torch.zeros(2, 8, dtype=torch.int64)


class Recording:
    """Records each collective as the guard does, without other ranks to meet."""

    def __init__(self) -> None:
        self.trace = CallTrace()

    def collective(self, group: Any, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.trace.add(tuple(dist.get_process_group_ranks(group)), describe(operation, args, kwargs))


def narrow_model(layers: int) -> Any:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=64,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def distribute(model: nn.Module, plan: ParallelPlan) -> None:
    """Turn a model into the model of rank 0 under the plan, with real shards."""
    build = build_on_fake_rank(model, plan)
    installation.make_weights(build, InitialWeights.find(build.facts, None).make).attach(build.facts)
    installation.install(build, torch.optim.AdamW(model.parameters()), seed=0)
    installation.guard_weights(build)


def times(model: Any) -> tuple[float, float]:
    """Return the CPU seconds of a forward and of a backward pass."""
    start = time.thread_time()
    loss: Tensor = model(input_ids=IDS, labels=IDS).loss
    middle = time.thread_time()
    loss.backward()
    end = time.thread_time()
    model.zero_grad()
    return middle - start, end - middle


def main(
    plan: Annotated[list[str] | None, typer.Option(help="a plan in words; may be given more than once")] = None,
    layers: Annotated[int, typer.Option(min=1, help="number of layers of the model")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="number of measured steps of each model")] = 20,
) -> None:
    """Print the CPU time of a layer in the stock model, and the time that each plan adds, in milliseconds."""
    torch.set_num_threads(1)
    print(f"{'plan':<20} {'stock':>7} {'forward':>8} {'backward':>9} {'both':>7}   (ms per layer)")
    for words in plan or PLANS:
        own = per_layer(words, layers, rounds)
        figures = f"{own.stock:7.2f} {own.forward:8.2f} {own.backward:9.2f} {own.forward + own.backward:7.2f}"
        print(f"{words:<20} {figures}", flush=True)


@dataclass(frozen=True)
class LayerTime:
    """CPU time of a layer, in milliseconds: of the stock model, and what a plan adds in forward and in backward."""

    stock: float
    forward: float
    backward: float


def per_layer(words: str, layers: int, rounds: int, change: Callable[[Any], object] = lambda model: None) -> LayerTime:
    """Return the CPU time of a layer under a plan, beside that of the stock model, whose steps alternate.

    Args:
        words: the plan.
        layers: the number of layers of the model.
        rounds: the number of measured steps of each model.
        change: a function that is called with the distributed model before its first step.
    """
    parsed, stock, model = ParallelPlan(**parse_plan(words)), narrow_model(layers), narrow_model(layers)
    with fake_world(parsed.world_size, 0):
        distribute(model, parsed)
        change(model)
        interpose.observe(Recording())  # type: ignore[arg-type]
        for one in (stock, model):
            times(one)
        pairs = [(times(stock), times(model)) for _ in range(rounds)]
        interpose.observe(None)
    added = [1e3 / layers * statistics.median(theirs[i] - own[i] for own, theirs in pairs) for i in (0, 1)]
    return LayerTime(1e3 / layers * statistics.median(sum(own) for own, _ in pairs), *added)


if __name__ == "__main__":
    typer.run(main)
