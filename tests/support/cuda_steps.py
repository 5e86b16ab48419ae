"""Traces steps on fake CUDA tensors in a process of its own, since the library for them stays loaded.

Reads the names of programs and faults, one a line, and answers each with a line of JSON:

echo "dp2 tp2+sp zero1" | python -m support.cuda_steps
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import meshwright as mw
from meshwright.tracing.cuda_order import order_problems
from meshwright.tracing.cuda_trace import CudaProgram, trace_cuda_step
from meshwright.tracing.fake_cuda import DEVICE

ROWS, LENGTH = 4, 16
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
HALF = {"dtype": torch.bfloat16}
SP = {"tp": 2, "sequence_parallel": True}
Change = Callable[[nn.Module], Any]

# What the test calls it: the plan, the model's options, the program's.
PROGRAMS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {}, {}),
    "dp2 zero1 bf16": ({"dp": 2, "zero_stage": 1}, HALF, {}),
    "dp2 zero3 bf16": ({"dp": 2, "zero_stage": 3}, HALF, {}),
    "dp2 of the rank's items": (
        {"dp": 2}, {}, {"batch": lambda: {"num_items_in_batch": torch.full((), 60, device=DEVICE)}},
    ),
    "dp2 of all items": (
        {"dp": 2}, {},
        {"config": mw.ToDistributedConfig(num_items_in_batch="global"), "batch": lambda: {"num_items_in_batch": 60}},
    ),
    "dp2 zero1 with status lines": (
        {"dp": 2, "zero_stage": 1}, {}, {"config": mw.ToDistributedConfig(logging_steps=1)},
    ),
    "dp2 accumulate": ({"dp": 2, "gradient_accumulation_steps": 2}, {}, {}),
    "dp2 zero2 accumulate": ({"dp": 2, "zero_stage": 2, "gradient_accumulation_steps": 2}, {}, {}),
    "dp2 micro-batches": ({"dp": 2, "micro_batch_size": 1}, {}, {}),
    "tp2 dropout": ({"tp": 2}, {"attention_dropout": 0.1}, {}),
    "tp2+sp": (SP, {}, {}),
    "tp2+sp autocast": (SP, {}, {"autocast": torch.bfloat16}),
    "tp2+sp dropout": (SP, {"attention_dropout": 0.1}, {}),
    "tp2+sp adapters with dropout, mask": (
        SP, {"adapters": True},
        {"batch": lambda: {"attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.int64, device=DEVICE)}},
    ),
    "tp2+sp no clip, foreach AdamW": (
        SP, {}, {"max_norm": None, "make_optimizer": lambda parameters: torch.optim.AdamW(parameters, foreach=True)},
    ),
    "tp4+sp": ({"tp": 4, "sequence_parallel": True}, {}, {}),
    "dp2 tp2+sp zero1": ({**SP, "dp": 2, "zero_stage": 1}, HALF, {}),
    "dp2 tp2+sp zero3 recompute": ({**SP, "dp": 2, "zero_stage": 3, "recompute": "full"}, HALF, {}),
    "cp2 gather": ({"cp": 2, "context": "gather"}, {}, {}),
    "cp2 ulysses autocast": ({"cp": 2, "context": "ulysses"}, {}, {"autocast": torch.bfloat16}),
    "cp2 ring": ({"cp": 2, "context": "ring"}, {}, {}),
    "cp4 hybrid": ({"cp": 4, "context": "hybrid", "ulysses": 2}, {}, {}),
    "cp2 ring tp2+sp zero1": ({**SP, "cp": 2, "context": "ring", "zero_stage": 1}, {}, {}),
    "pp2": ({"pp": 2, "micro_batch_size": 1}, {}, {}),
    "pp2 zb-h1": ({"pp": 2, "micro_batch_size": 1, "schedule": "zb-h1"}, {}, {}),
    "pp2 tied": ({"pp": 2, "micro_batch_size": 1}, {"tie_word_embeddings": True}, {}),
    "pp2 cp2 ring": ({"pp": 2, "cp": 2, "context": "ring", "micro_batch_size": 1}, {}, {}),
    "pp2 dp2 tp2+sp zero1": ({**SP, "pp": 2, "dp": 2, "zero_stage": 1, "micro_batch_size": 1}, {}, {}),
}  # fmt: skip


def make(*, adapters: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, **options), dtype=dtype)
        if adapters:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], r=2, lora_dropout=0.1))
    return model.train()


def reads_a_number(model: nn.Module) -> None:
    model.model.norm.register_forward_hook(lambda module, args, output: output * output.sum().item())


def copies_a_number(model: nn.Module) -> None:
    model.model.norm.register_forward_hook(
        lambda module, args, output: output * torch.tensor([1.0, 2.0], device=DEVICE).sum()
    )


def uses_early(model: nn.Module) -> None:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        shared = output.detach().clone()
        work = dist.all_reduce(shared, async_op=True)
        result = output + shared
        work.wait()
        return result

    model.model.norm.register_forward_hook(hook)


def stays_on_host(model: nn.Module) -> None:
    model.register_buffer("forgotten", torch.zeros(2))


def one_rank_sends_more(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        model.model.norm.register_forward_hook(lambda module, args, output: dist.all_reduce(output.detach().sum()))


def gathers_a_list(model: nn.Module) -> None:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        dist.all_gather([torch.empty_like(output) for _ in range(2)], output.detach())

    model.model.norm.register_forward_hook(hook)


FAULTS: dict[str, Change] = {
    change.__name__: change
    for change in (reads_a_number, copies_a_number, uses_early, stays_on_host, one_rank_sends_more, gathers_a_list)
}


def traced(
    plan: mw.ParallelPlan,
    options: dict[str, Any],
    program: dict[str, Any],
    ranks: tuple[int, ...],
    change: Change | None = None,
) -> list[str]:
    steps = {}
    layers = 2 if plan.pp > 1 else 1
    for rank in ranks:
        model = make(num_hidden_layers=layers, **options)
        of_rank = CudaProgram(rows=ROWS, length=LENGTH, **program)
        steps[rank] = trace_cuda_step(model, plan, of_rank, rank=rank, prepare=change)
    assert all(step.issued for step in steps.values())
    found = [f"rank {rank}: {problem}" for rank, step in steps.items() for problem in step.problems]
    return found + order_problems(steps)


def traced_fault(name: str) -> list[str]:
    """Return the problems of rank 0, and of both ranks where they differ."""
    ranks = (0, 1) if name == one_rank_sends_more.__name__ else (0,)
    return traced(mw.ParallelPlan(dp=2), {}, {}, ranks, FAULTS[name])


def traced_program(name: str) -> list[str]:
    """Return the problems of rank 0, of a neighbour on the innermost axis, and of one on the outermost axis."""
    options, *rest = PROGRAMS[name]
    plan = mw.ParallelPlan(**options)
    return traced(plan, *rest, tuple(sorted({0, 1, plan.world_size // 2})))


if __name__ == "__main__":
    for line in sys.stdin:
        name = line.rstrip("\n")
        print(json.dumps(traced_fault(name) if name in FAULTS else traced_program(name)), flush=True)
