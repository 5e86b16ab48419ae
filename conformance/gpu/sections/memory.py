"""The planner's estimate of memory against the allocator's peak on a GPU, and against a trace on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from conformance.gpu.ranks import RankPools, rank_pools
from conformance.gpu.section import Check, Place, Section, attempt, not_run
from meshwright.choose.given_plan import resolve_plan
from meshwright_plan.job.adapters import Lora
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.shapes import describe
from meshwright_plan.memory.footprint import footprint
from meshwright_tools.tracing.trace import trace_step

_GOAL = 0.05
_HALF, _SINGLE = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """A plan, the dtype of the weights, each rank's batch, and the rank of the adapters that alone are trained."""

    plan: str
    dtype: torch.dtype
    rows: int
    length: int
    lora: int | None = None

    @property
    def name(self) -> str:
        adapters = "" if self.lora is None else ", LoRA"
        return f"{self.plan}, {str(self.dtype).removeprefix('torch.')}, {self.rows} x {self.length}{adapters}"

    def smaller(self) -> Case:
        return replace(self, length=self.length // 8)


CASES = (
    Case("tp1", _HALF, 4, 2048),
    Case("tp1", _SINGLE, 2, 2048),
    Case("tp1 recompute=full", _HALF, 4, 2048),
    Case("dp2 zero1", _HALF, 2, 2048),
    Case("dp2 zero3", _HALF, 2, 2048),
    Case("tp2+sp", _HALF, 2, 2048),
    Case("tp1", _HALF, 1, 8192),
    Case("tp1 recompute=full", _HALF, 1, 16384),
    Case("dp2", _HALF, 2, 2048),
    Case("dp2 zero2", _HALF, 2, 2048),
    Case("tp2", _SINGLE, 2, 2048),
    Case("tp2+sp recompute=full", _HALF, 2, 2048),
    Case("dp2 tp2+sp zero1", _HALF, 2, 2048),
    Case("tp1", _HALF, 2, 2048, lora=16),
)
_LARGE = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip
_SMALL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 16000,
}  # fmt: skip


class MemoryUse(Section):
    """Compares the peak of a step with the planner's estimate, case by case."""

    name = "memory"
    question = "Is the peak of a step what the planner expects: on a GPU the allocator's, on a CPU that of a trace?"
    share = 4.0

    def run(self, place: Place) -> Iterator[Check]:
        with rank_pools() as pools:
            for given in CASES:
                case, sizes = (given, _LARGE) if place.is_cuda else (given.smaller(), _SMALL)
                if case.lora is not None and find_spec("peft") is None:
                    yield not_run(case.name, "peft")
                    continue
                yield from attempt(case.name, _compared, case, sizes, place, pools)


def _compared(case: Case, sizes: dict[str, int], place: Place, pools: RankPools) -> Check:
    plan = resolve_plan(case.plan)
    if place.is_cuda:
        peak = max(pools.run(plan.world_size, allocated, case, sizes, place.plants))
    else:
        peak = traced(case, sizes, place.plants)
    job = Job(
        seq_len=case.length,
        global_batch=case.rows,
        on_cpu=not place.is_cuda,
        lora=None if case.lora is None else Lora(rank=case.lora),
    )
    job = job.in_32_bits() if case.dtype is _SINGLE else job
    expected = footprint(
        describe(LlamaConfig(**sizes)),
        Candidate.of(plan, Job(seq_len=1, global_batch=plan.dp * case.rows)),
        job,
    ).peak
    return Check(
        what=f"{case.name}: peak, off the estimate",
        figure=abs(peak / expected - 1),
        goal=_GOAL,
        details={"MiB measured": peak / 2**20, "MiB expected": expected / 2**20},
    )


def _new(case: Case, sizes: dict[str, int], device: str, plants: bool) -> Any:
    """Return the model; a planted fault keeps copies of the layers' outputs."""
    config = LlamaConfig(**sizes, max_position_embeddings=case.length, use_cache=False)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(case.dtype).train()
    if plants:
        kept: list[torch.Tensor] = []

        def keep(module: nn.Module, args: object, output: torch.Tensor) -> None:
            kept.extend(output.detach().clone() for _ in range(4))

        for layer in model.model.layers:
            layer.register_forward_hook(keep)
    if case.lora is not None:
        from peft import LoraConfig, get_peft_model

        with torch.device(device):
            return get_peft_model(model, LoraConfig(r=case.lora, target_modules="all-linear"))
    return model


def traced(case: Case, sizes: dict[str, int], plants: bool) -> int:
    """Return the peak of a step on fake tensors, in bytes."""
    plan = resolve_plan(case.plan)
    return trace_step(_new(case, sizes, "meta", plants), plan, rows=case.rows, length=case.length).peak


def allocated(case: Case, sizes: dict[str, int], plants: bool) -> int:
    """Return the allocator's peak on this rank in a step, in bytes, above what was there before the model."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = _new(case, sizes, "cuda", plants)
    config = mw.ToDistributedConfig(plan=resolve_plan(case.plan), check_replicas_every=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer, _ = mw.to_distributed(model, torch.optim.AdamW(trained), config=config)
    ids = torch.zeros(case.rows, case.length, dtype=torch.int64, device="cuda")
    peak = 0
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peak = torch.cuda.max_memory_allocated() - before
    return peak
