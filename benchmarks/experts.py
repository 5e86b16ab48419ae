"""Expert parallelism against transformers' own and DeepSpeed's AutoEP, on the CPU.

torchrun --nproc-per-node 2 -m benchmarks.experts --figure equal
torchrun --nproc-per-node 2 -m benchmarks.experts --figure time --rounds 24

equal: loss, gradient norm and gradients of the first step, against those of one process. time: step times, in turn.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

import meshwright as mw
from benchmarks import contenders
from benchmarks.contenders import Contender
from benchmarks.summary import Ratio
from benchmarks.timing import Clocked, say, time_after_warm_up
from benchmarks.workload import Workload
from meshwright.faults.guard import active_guard
from meshwright.faults.interpose import observe


@dataclass(frozen=True, kw_only=True)
class ExpertRows(Workload):
    """A Qwen3-MoE of about 9 M parameters, with the proportions of Qwen3-30B-A3B but fewer experts."""

    hidden_size: int = 256
    vocab_size: int = 4096
    sequence_length: int = 128
    experts: int = 16
    experts_per_token: int = 4
    expert_width: int = 96

    def model(self) -> nn.Module:
        """Return a new ``Qwen3MoeForCausalLM`` with the same weights in every call and on every rank."""
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(self.seed)
        config = Qwen3MoeConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.hidden_size // self.num_attention_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.sequence_length,
            num_experts=self.experts,
            num_experts_per_tok=self.experts_per_token,
            moe_intermediate_size=self.expert_width,
            norm_topk_prob=True,
            use_cache=False,
        )
        return Qwen3MoeForCausalLM(config).train()


@dataclass(frozen=True)
class Answer:
    """What a contender computes in its first step.

    Args:
        loss: the mean over the global batch.
        norm: the norm of the gradients; None on ranks but the first.
        gradients: each gradient by its name, whole; empty if the library does not give them.
    """

    loss: float
    norm: float | None
    gradients: dict[str, Tensor]


def answer_of(contender: Contender) -> Answer:
    """Run a forward and a backward pass; every rank makes the call."""
    observe(active_guard() if contender.watched else None)
    if contender.idle:
        return Answer(0.0, None, {})
    loss = contender.forward()
    contender.backward(loss)
    mean = loss.detach().double()
    if not isinstance(contender, contenders.OneProcess):
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    if isinstance(contender, AutoEP):
        contender.update()
        return Answer(mean.item(), float(contender.model.get_global_grad_norm()), {})
    if isinstance(contender, contenders.Ours):
        gradients = mw.full_gradients(contender.model)
    else:
        gradients = {name: _whole(p.grad) for name, p in contender.model.named_parameters() if p.grad is not None}
    if dist.get_rank():
        return Answer(mean.item(), None, {})  # ours are on the first rank alone
    norm = nn.utils.get_total_norm(x.double() for x in gradients.values())
    return Answer(mean.item(), norm.item(), gradients)


def _whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


class StockExpertParallel(Contender):
    """transformers' own expert parallelism, over FSDP."""

    def __init__(self, workload: ExpertRows) -> None:
        from transformers import Qwen3MoeForCausalLM
        from transformers.distributed import DistributedConfig

        model, size = workload.model(), dist.get_world_size()
        self.model = Qwen3MoeForCausalLM.from_pretrained(
            None,
            config=model.config,
            state_dict=model.state_dict(),
            distributed_config=DistributedConfig(fsdp_size=size, ep_size=size),
        ).train()
        self.optimizer = workload.optimizer(self.model.parameters())
        self.batch = workload.batch(part=dist.get_rank(), parts=size)

    def clip(self) -> None:
        """Do nothing: torch's function raises an error on this model, whose DTensors have two meshes."""


class AutoEP(contenders.DeepSpeed):
    """DeepSpeed's AutoEP, with ZeRO-1."""

    def __init__(self, workload: ExpertRows) -> None:
        from transformers.utils import output_capturing

        def get(registry: dict[str, Any], of: object, default: object = None) -> object:
            return dict.get(registry, of if isinstance(of, str) else str(type(of)), default or {})

        size = dist.get_world_size()
        # DeepSpeed 0.19 calls get with a default, which the method of transformers 5.23 does not take.
        with mock.patch.object(type(output_capturing._CAN_RECORD_REGISTRY), "get", get):
            super().__init__(workload, further={"expert_parallel": {"enabled": True, "autoep_size": size}})

    def optimizer_of(self, model: nn.Module, workload: Workload) -> dict[str, Any]:
        """Let DeepSpeed make the optimizer, with groups of their own for experts, once it has replaced these."""
        from deepspeed.moe.utils import configure_moe_param_groups

        def make(parameters: Any) -> torch.optim.Optimizer:
            return workload.optimizer(configure_moe_param_groups(list(parameters)))

        return {"optimizer": make, "model_parameters": list(model.parameters())}


Build = Callable[[ExpertRows], Any]
STOCK, AUTOEP = "stock transformers fsdp2 ep2", "deepspeed autoep2 zero1"
OURS: dict[str, Build] = {
    "ours dp2 ep2": partial(contenders.Ours, dp=2, ep=2),
    "ours dp2 ep2 zero1": partial(contenders.Ours, dp=2, ep=2, zero_stage=1),
    "ours dp2 ep2 zero3": partial(contenders.Ours, dp=2, ep=2, zero_stage=3),
    "ours dp2 ep2 all_gather": partial(contenders.Ours, dp=2, ep=2, token_dispatcher="all_gather"),
    "ours dp2": partial(contenders.Ours, dp=2),
}
THEIRS: dict[str, Build] = {STOCK: StockExpertParallel, AUTOEP: AutoEP}


def equal(workload: ExpertRows, builds: dict[str, Build], rounds: int) -> None:
    """Print how far each contender's first step is from that of one process."""
    expected = answer_of(contenders.OneProcess(workload))
    say("| contender | loss | gradient norm | worst gradient |\n|---|---|---|---|")
    for name, build in builds.items():
        found = answer_of(build(workload))
        if dist.get_rank():
            continue
        worst = {
            of: float((x - expected.gradients[of]).abs().max() / expected.gradients[of].abs().max())
            for of, x in found.gradients.items()
        }
        assert expected.norm is not None and found.norm is not None
        furthest = max(worst, key=worst.__getitem__, default="")
        shown = f"{worst[furthest]:.1e} ({furthest})" if worst else ""
        loss, norm = found.loss / expected.loss - 1, found.norm / expected.norm - 1
        say(f"| {name} | {abs(loss):.1e} | {abs(norm):.1e} | {shown} |")


def step_time(workload: ExpertRows, builds: dict[str, Build], rounds: int) -> None:
    """Print each contender's step time, and its ratio to that of the others, in wall and in CPU seconds."""
    clocked = {name: Clocked(build(workload)) for name, build in builds.items()}
    wall = time_after_warm_up(clocked, rounds)
    cpu = {name: contender.seconds[-rounds:] for name, contender in clocked.items()}
    bases = [name for name in THEIRS if name in builds]
    tokens = workload.batch_size * workload.sequence_length
    say(f"{tokens} tokens on {dist.get_world_size()} ranks, {rounds} rounds\n")
    say(f"| contender | median s | CPU s | {' | '.join(f'/ {base} | CPU' for base in bases)} |")
    say("|---|---|---|" + "---|---|" * len(bases))
    for name in clocked:
        ratios = [str(Ratio.paired(x[name], x[base])) for base in bases for x in (wall, cpu)]
        say(f"| {name} | {median(wall[name]):.3f} | {median(cpu[name]):.3f} | {' | '.join(ratios)} |")


FIGURES = {"equal": equal, "time": step_time}


def main(
    figure: Annotated[str, typer.Option(help=f"One of {', '.join(FIGURES)}.")] = "equal",
    rounds: Annotated[int, typer.Option(help="Number of measurements.")] = 24,
    length: Annotated[int, typer.Option(help="Tokens of each of the four rows.")] = ExpertRows.sequence_length,
    only: Annotated[list[str] | None, typer.Option(help="A contender by its name in the table (default: all).")] = None,
) -> None:
    """Measure one figure; torchrun starts this program on each rank."""
    warnings.filterwarnings("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names: Sequence[str] = only or [*OURS, *THEIRS]
    FIGURES[figure](ExpertRows(sequence_length=length), {name: (OURS | THEIRS)[name] for name in names}, rounds)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
