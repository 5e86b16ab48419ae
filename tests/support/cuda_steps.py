"""Traces steps on fake CUDA tensors in a process of its own, since the library for them stays loaded.

Reads the names of programs and faults, one a line, and answers each with a line of JSON:

echo "dp2 tp2+sp zero1" | python -m support.cuda_steps
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import meshwright as mw
from meshwright_tools.tracing.cuda_trace import DEVICE, CudaProgram, order_problems, trace_cuda_step

ROWS, LENGTH = 4, 16
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
HALF = {"dtype": torch.bfloat16}
SP = {"tp": 2, "sequence_parallel": True}
EXPERTS = {"family": "mixtral", "num_local_experts": 4, **HALF}
PP = {"pp": 2, "micro_batch_size": 1}
Change = Callable[[nn.Module], Any]


def mask() -> dict[str, Any]:
    return {"attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.int64, device=DEVICE)}


def packed() -> dict[str, Any]:
    return {"position_ids": torch.arange(LENGTH, device=DEVICE).remainder(8).expand(ROWS, LENGTH)}


def own_items() -> dict[str, Any]:
    return {"num_items_in_batch": torch.full((), 60, device=DEVICE)}


def smooth(model: nn.Module) -> None:
    model.loss_function._smoothing = 0.1


def skip_mlp(model: nn.Module) -> None:
    """Leave the weights of the first MLP without gradients."""
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: args[0])


def adamw(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, **options)


EVERY_STEP = mw.ToDistributedConfig(check_replicas_every=1)
GLOBAL_ITEMS = mw.ToDistributedConfig(num_items_in_batch="global", check_replicas_every=1)
LINES = mw.ToDistributedConfig(logging_steps=1, check_replicas_every=1)
ALL_GATHER = mw.ToDistributedConfig(token_dispatcher="all_gather", check_replicas_every=1)
WHOLE_LOGITS = mw.ToDistributedConfig(gather_logits=True, check_replicas_every=1)

# What the test calls it: the plan, the model's options, the program's.
PROGRAMS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {}, {}),
    "dp2 bf16 wire": ({"dp": 2, "reduce_dtype": "bfloat16"}, {}, {}),
    "dp2 zero1 bf16": ({"dp": 2, "zero_stage": 1}, HALF, {}),
    "dp2 zero1 fused AdamW": ({"dp": 2, "zero_stage": 1}, HALF, {"make_optimizer": adamw(fused=True)}),
    "dp2 zero2": ({"dp": 2, "zero_stage": 2}, {}, {}),
    "dp2 zero3 bf16": ({"dp": 2, "zero_stage": 3}, HALF, {}),
    "dp2 zero3 bf16 wire": ({"dp": 2, "zero_stage": 3, "reduce_dtype": "bfloat16"}, HALF, {}),
    "dp2 zero3 adapters": ({"dp": 2, "zero_stage": 3}, {"adapters": True}, {}),
    "dp2 zero3 evaluation": ({"dp": 2, "zero_stage": 3}, HALF, {"trains": False}),
    "dp2 of the rank's items": ({"dp": 2}, {}, {"batch": own_items}),
    "dp2 of all items": ({"dp": 2}, {}, {"config": GLOBAL_ITEMS, "batch": lambda: {"num_items_in_batch": 60}}),
    "dp2 zero1 with status lines": ({"dp": 2, "zero_stage": 1}, {}, {"config": LINES}),
    "dp2 accumulate": ({"dp": 2, "gradient_accumulation_steps": 2}, {}, {}),
    "dp2 zero2 accumulate": ({"dp": 2, "zero_stage": 2, "gradient_accumulation_steps": 2}, {}, {}),
    "dp2 micro-batches": ({"dp": 2, "micro_batch_size": 1}, {}, {}),
    "tp2 dropout": ({"tp": 2}, {"attention_dropout": 0.1}, {}),
    "tp2 whole logits": ({"tp": 2}, {}, {"config": WHOLE_LOGITS}),
    "tp2+sp": (SP, {}, {}),
    "tp2+sp evaluation": (SP, {}, {"trains": False}),
    "tp2+sp smoothed labels": (SP, {}, {"prepare": smooth}),
    "tp2+sp olmo2": (SP, {"family": "olmo2", **HALF}, {}),
    "tp2+sp gemma2": (SP, {"family": "gemma2", "head_dim": 8, **HALF}, {}),
    "tp2+sp biases": (SP, {"attention_bias": True, "mlp_bias": True}, {}),
    "tp2+sp autocast": (SP, {}, {"autocast": torch.bfloat16}),
    "tp2+sp dropout": (SP, {"attention_dropout": 0.1}, {}),
    "tp2+sp adapters with dropout, mask": (SP, {"adapters": True}, {"batch": mask}),
    "tp2+sp no clip, foreach AdamW": (SP, {}, {"max_norm": None, "make_optimizer": adamw(foreach=True)}),
    "tp2+sp clip, foreach AdamW": (SP, {}, {"make_optimizer": adamw(foreach=True)}),
    "tp4+sp": ({"tp": 4, "sequence_parallel": True}, {}, {}),
    "dp2 tp2+sp zero1": ({**SP, "dp": 2, "zero_stage": 1}, HALF, {}),
    "dp2 tp2+sp zero3 recompute": ({**SP, "dp": 2, "zero_stage": 3, "recompute": "full"}, HALF, {}),
    "cp2 gather": ({"cp": 2, "context": "gather"}, {}, {}),
    "cp2 gather, mask": ({"cp": 2, "context": "gather"}, {}, {"batch": mask}),
    "cp2 ulysses autocast": ({"cp": 2, "context": "ulysses"}, {}, {"autocast": torch.bfloat16}),
    "cp2 ulysses tp2+sp zero3": ({**SP, "cp": 2, "context": "ulysses", "zero_stage": 3}, {}, {}),
    "cp2 ring": ({"cp": 2, "context": "ring"}, {}, {}),
    "cp2 ring, mask": ({"cp": 2, "context": "ring"}, {}, {"batch": mask}),
    "cp4 hybrid": ({"cp": 4, "context": "hybrid", "ulysses": 2}, {}, {}),
    "cp2 ring tp2+sp zero1": ({**SP, "cp": 2, "context": "ring", "zero_stage": 1}, {}, {}),
    "pp2": (PP, {}, {}),
    "pp2 of the rank's items": (PP, {}, {"batch": own_items}),
    "pp2 whole logits": (PP, {}, {"config": WHOLE_LOGITS}),
    "pp2 evaluation": (PP, {}, {"trains": False}),
    "pp2 gpipe": ({**PP, "schedule": "gpipe"}, {}, {}),
    "pp2 interleaved": ({**PP, "schedule": "interleaved"}, {"num_hidden_layers": 4}, {}),
    "pp2 zb-h1": ({**PP, "schedule": "zb-h1"}, {}, {}),
    "pp2 zbv": ({**PP, "schedule": "zbv"}, {"num_hidden_layers": 4}, {}),
    "pp2 tied": (PP, {"tie_word_embeddings": True}, {}),
    "pp2 adapters": (PP, {"adapters": True}, {}),
    "pp2 cp2 ring": ({**PP, "cp": 2, "context": "ring"}, {}, {}),
    "pp2 dp2 tp2+sp zero1": ({**SP, **PP, "dp": 2, "zero_stage": 1}, {}, {}),
    "dp2 ep2 zero1, all tokens to all": ({"dp": 2, "ep": 2, "zero_stage": 1}, EXPERTS, {"config": ALL_GATHER}),
    "tp2+sp ep2, all tokens to all": ({**SP, "ep": 2}, EXPERTS, {"config": ALL_GATHER}),
}  # fmt: skip


# Programs in which the host waits once: for the number of tokens that travel to the experts of its one layer, and where
# rank 0 lacks gradients, for each bucket that lacks some; each has one bucket.
WAITS = {
    "dp2 ep2": ({"dp": 2, "ep": 2}, {**EXPERTS, "num_hidden_layers": 1}, {}),
    "dp2 without some gradients": ({"dp": 2}, {}, {"prepare": skip_mlp}),
    "dp2 zero1 without some gradients": ({"dp": 2, "zero_stage": 1}, HALF, {"prepare": skip_mlp}),
    "dp2 zero3 without some gradients": ({"dp": 2, "zero_stage": 3}, HALF, {"prepare": skip_mlp}),
}
# Programs in which the host waits for the gradients of each bucket that it steps; each has one bucket.
OFFLOADS = {
    "dp2 zero1 bf16 offload": ({"dp": 2, "zero_stage": 1, "offload": "optimizer"}, HALF, {}),
    "dp2 tp2+sp zero2 offload": ({**SP, "dp": 2, "zero_stage": 2, "offload": "optimizer"}, {}, {}),
    "dp2 zero3 bf16 offload": ({"dp": 2, "zero_stage": 3, "offload": "optimizer"}, HALF, {}),
    "dp2 zero1 offload, fused AdamW": (
        {"dp": 2, "zero_stage": 1, "offload": "optimizer"}, {}, {"make_optimizer": adamw(fused=True)},
    ),
}  # fmt: skip


def make(
    *, family: str = "llama", adapters: bool = False, dtype: torch.dtype = torch.float32, **options: Any
) -> nn.Module:
    config = AutoConfig.for_model(family, **{**SIZES, **options})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
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


def before_the_norm(run: Callable[[torch.Tensor], Any]) -> Change:
    """Return a change that calls ``run`` with a copy of the last norm's output, and keeps the output."""

    def change(model: nn.Module) -> None:
        model.model.norm.register_forward_hook(lambda module, args, output: (run(output.detach().clone()), None)[1])

    return change


def on_rank_1(run: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    return lambda x: run(x) if dist.get_rank() == 1 else None


def overwrites_an_input(x: torch.Tensor) -> None:
    work = dist.all_gather_into_tensor(x.new_empty(2 * x.numel()), x.view(-1), async_op=True)
    x.zero_()
    work.wait()


def uses_a_message_early(x: torch.Tensor) -> None:
    work = dist.irecv(x, src=1)
    x.sum()
    work.wait()


class _StateOnHost(torch.optim.AdamW):
    """Keeps its moments on the host."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("moment", torch.zeros(parameter.shape, device="cpu"))


def unchanged(model: nn.Module) -> None:
    pass


# What the test calls it: the change of the model, and the words that must be found.
FAULTS: dict[str, tuple[Change, str]] = {
    "reads a number": (reads_a_number, "the host waits: _local_scalar_dense"),
    "reads a list": (before_the_norm(lambda x: x[0, 0].tolist()), "the host waits: tolist"),
    "compares on the host": (before_the_norm(lambda x: torch.equal(x, x)), "the host waits: equal"),
    "meets at a barrier": (before_the_norm(lambda x: dist.barrier()), "the host waits: barrier"),
    "copies a number": (copies_a_number, "a blocking copy: cpu to cuda"),
    "reads a copy at once": (
        before_the_norm(lambda x: x.sum().to("cpu", non_blocking=True).item()), "read before its copy to the host",
    ),
    "uses early": (uses_early, "used before its collective has ended"),
    "uses a message early": (before_the_norm(uses_a_message_early), "used before its collective has ended"),
    "overwrites an input": (before_the_norm(overwrites_an_input), "overwritten before its collective has ended"),
    "a buffer on the host": (stays_on_host, "not on the device: forgotten"),
    "an optimizer on the host": (unchanged, "not on the device: moment of the optimizer"),
    "one rank sends more": (
        before_the_norm(on_rank_1(lambda x: dist.all_reduce(x.sum()))), "rank 0 issues",
    ),
    "ranks differ in dtype": (
        before_the_norm(lambda x: dist.all_reduce(x.to(torch.float16 if dist.get_rank() else torch.float32))),
        "rank 1 allreduce_ of [4, 16, 32] float16",
    ),
    "ranks differ in root": (before_the_norm(lambda x: dist.broadcast(x, src=dist.get_rank())), "with root 1"),
    "gathers a list": (
        before_the_norm(lambda x: dist.all_gather([torch.empty_like(x) for _ in range(2)], x)),
        "NCCL does not take as it is: allgather_",
    ),
    "sends from the host": (
        before_the_norm(lambda x: dist.all_reduce(torch.zeros(3, device="cpu"))),
        "NCCL does not take as it is: allreduce_ of tensors on cpu",
    ),
    "sends a transposed tensor": (
        before_the_norm(lambda x: dist.all_reduce(x.transpose(0, 1))), "of a tensor that is not contiguous",
    ),
    "packed rows under cp": (unchanged, "the host reads the places of packed documents"),
}  # fmt: skip
# The faults that need another plan or program.
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an optimizer on the host": ({"dp": 2}, {"make_optimizer": _StateOnHost}),
    "packed rows under cp": ({"cp": 2}, {"batch": packed}),
}


def traced(
    plan: mw.ParallelPlan,
    options: dict[str, Any],
    program: dict[str, Any],
    ranks: Iterable[int],
    change: Change | None = None,
) -> list[str]:
    steps = {}
    layers = {"num_hidden_layers": 2 if plan.pp > 1 else 1}
    for rank in ranks:
        model = make(**{**layers, **options})
        of_rank = CudaProgram(**{"rows": ROWS, "length": LENGTH, "config": EVERY_STEP, **program})
        steps[rank] = trace_cuda_step(model, plan, of_rank, rank=rank, prepare=change)
    assert all(step.issued for step in steps.values())
    found = [f"rank {rank}: {problem}" for rank, step in steps.items() for problem in step.problems]
    return found + order_problems(steps)


def traced_fault(name: str) -> list[str]:
    """Return the problems of rank 0, and of both ranks where they differ; or why the trace refuses the program."""
    plan, program = OTHERS.get(name, ({"dp": 2}, {}))
    try:
        return traced(mw.ParallelPlan(**plan), {}, program, (0, 1) if "rank" in name else (0,), FAULTS[name][0])
    except mw.PlanError as error:
        return [str(error)]


def traced_program(name: str) -> list[str]:
    """Return the problems of all ranks."""
    options, of_model, of_program = {**PROGRAMS, **WAITS, **OFFLOADS}[name]
    of_program = dict(of_program)
    change = of_program.pop("prepare", None)
    plan = mw.ParallelPlan(**options)
    return traced(plan, of_model, of_program, range(plan.world_size), change)


if __name__ == "__main__":
    for line in sys.stdin:
        name = line.rstrip("\n")
        print(json.dumps(traced_fault(name) if name in FAULTS else traced_program(name)), flush=True)
