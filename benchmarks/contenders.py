"""The contenders: each library trains the workload in its own way, as its documentation shows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.workload import Workload

MAX_NORM = 1e9  # changes no gradient, but every library computes the norm and multiplies the gradients


class Contender:
    """A model, its batch and its optimizer on this rank; the base class is a plain torch loop."""

    model: Any
    optimizer: Any
    batch: dict[str, Tensor]
    idle: bool = False  # True on a rank that this contender does not use
    watched: bool = False  # True if meshwright's guard compares the ranks, which it must not do for other libraries

    def forward(self) -> Tensor:
        """Return the loss of this rank's batch."""
        return self.model(**self.batch).loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self) -> Tensor | None:
        """Clip the gradients; return their norm. None if the library clips elsewhere, or not at all."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> Tensor | None:
        """Run one training step. Return the loss before the update; None on an idle rank."""
        if self.idle:
            return None
        loss = self.forward()
        self.backward(loss)
        self.clip()
        self.update()
        return loss.detach()


class OneProcess(Contender):
    """Plain torch on rank 0; the other ranks stay idle."""

    def __init__(self, workload: Workload) -> None:
        if dist.get_rank() != 0:
            self.idle = True
            return
        self.model = workload.model()
        self.optimizer = workload.optimizer(self.model.parameters())
        self.batch = workload.batch()


class Ours(Contender):
    """This project's ``to_distributed``."""

    watched = True

    def __init__(self, workload: Workload, token_dispatcher: str = "all_to_all", **plan: Any) -> None:
        from torch.utils.data import DataLoader

        import meshwright as mw

        model = workload.model()
        self.model, self.optimizer, loader = mw.to_distributed(
            model,
            workload.optimizer(model.parameters()),
            DataLoader(workload.rows(), batch_size=workload.batch_size),
            device_num=dist.get_world_size(),
            node_num=1,
            config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), token_dispatcher=token_dispatcher),
        )
        self.batch = next(iter(loader))

    def clip(self) -> Tensor | None:
        import meshwright as mw

        return mw.clip_grad_norm_(self.model, MAX_NORM)


class OursWrapped(Contender):
    """This project's ``DataParallel`` around the model, in a plain loop."""

    watched = True

    def __init__(self, workload: Workload) -> None:
        import meshwright as mw

        self.model = mw.DataParallel(workload.model())
        self.optimizer = workload.optimizer(self.model.parameters())
        self.batch = workload.batch(part=dist.get_rank(), parts=dist.get_world_size())

    def clip(self) -> Tensor | None:
        import meshwright as mw

        return mw.clip_grad_norm_(self.model, MAX_NORM)


class StockTensorParallel(Contender):
    """transformers' own tensor parallelism, from a ``DistributedConfig``."""

    def __init__(self, workload: Workload) -> None:
        from transformers import LlamaForCausalLM
        from transformers.distributed import DistributedConfig

        model = workload.model()
        self.model = LlamaForCausalLM.from_pretrained(
            None,
            config=model.config,
            state_dict=model.state_dict(),
            distributed_config=DistributedConfig(tp_size=dist.get_world_size()),
        ).train()
        self.optimizer = workload.optimizer(self.model.parameters())
        self.batch = workload.batch()

    def clip(self) -> None:
        """Do nothing: torch's function raises an error on this model, which mixes tensors and DTensors."""


class DataParallel(Contender):
    """torch's DistributedDataParallel."""

    def __init__(self, workload: Workload) -> None:
        self.model = torch.nn.parallel.DistributedDataParallel(workload.model())
        self.optimizer = workload.optimizer(self.model.parameters())
        self.batch = workload.batch(part=dist.get_rank(), parts=dist.get_world_size())


class DeepSpeed(Contender):
    """A DeepSpeed engine with ZeRO-1.

    Args:
        workload: what to train.
        tensor_parallel: settings of AutoTP over all ranks; None trains data parallel.
        further: further settings of DeepSpeed.
    """

    def __init__(
        self,
        workload: Workload,
        tensor_parallel: dict[str, Any] | None = None,
        further: dict[str, Any] | None = None,
    ) -> None:
        import deepspeed
        import deepspeed.ops

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # DeepSpeed's shared-memory all-reduce needs a compiler at run time; all other contenders use gloo.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed()
        world_size = dist.get_world_size()
        parts = world_size if tensor_parallel is None else 1
        self.batch = workload.batch(part=dist.get_rank() % parts, parts=parts)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": workload.batch_size // parts,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": MAX_NORM,
            **(further or {}),
        }
        if tensor_parallel is not None:
            config["tensor_parallel"] = {"autotp_size": world_size, **tensor_parallel}
        model = workload.model()
        self.model, *_ = deepspeed.initialize(model=model, config=config, **self.optimizer_of(model, workload))

    def optimizer_of(self, model: torch.nn.Module, workload: Workload) -> dict[str, Any]:
        """Return the arguments of ``initialize`` that say which optimizer to use."""
        return {"optimizer": workload.optimizer(model.parameters())}

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def clip(self) -> None:
        """Do nothing: the engine clips in its step."""

    def update(self) -> None:
        self.model.step()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contender by name, which is built (and its library imported) only when it runs.

    Args:
        name: its name in the tables.
        build: a function that builds it on every rank.
        library: the package that must be installed.
        clips: whether a step clips the gradients.
        ranks: the number of its processes.
    """

    name: str
    build: Callable[[Workload], Contender]
    library: str = "torch"
    clips: bool = True
    ranks: int = 2

    @property
    def installed(self) -> bool:
        return find_spec(self.library) is not None


OURS_TP, OURS_DP, OURS_ZERO = "ours tp2+sp", "ours dp2", "ours dp2+zero1"
OURS_WRAPPED, TORCH_DDP, DEEPSPEED_ZERO = "ours DataParallel dp2", "torch DDP dp2", "deepspeed zero1 dp2"
STOCK_TP = "stock transformers tp2"
# By default DeepSpeed gathers the logits of the whole vocabulary. We compare with the better setting, which leaves this
# gather out.
AUTOTP, AUTOTP_DEFAULT = "deepspeed autotp tp2 zero1", "the same, full logits"
ONE_PROCESS = "one process"

CONTESTS: dict[str, tuple[Entry, ...]] = {
    "tp": (
        Entry(name=OURS_TP, build=partial(Ours, tp=2, sequence_parallel=True), library="meshwright"),
        Entry(name=STOCK_TP, build=StockTensorParallel, library="transformers", clips=False),
        Entry(
            name=AUTOTP,
            build=partial(DeepSpeed, tensor_parallel={"vocab_parallel_lm_head": True}),
            library="deepspeed",
        ),
        Entry(name=AUTOTP_DEFAULT, build=partial(DeepSpeed, tensor_parallel={}), library="deepspeed"),
        Entry(name=ONE_PROCESS, build=OneProcess, ranks=1),
    ),
    "dp": (
        Entry(name=OURS_DP, build=partial(Ours, dp=2), library="meshwright"),
        Entry(name=OURS_ZERO, build=partial(Ours, dp=2, zero_stage=1), library="meshwright"),
        Entry(name=OURS_WRAPPED, build=OursWrapped, library="meshwright"),
        Entry(name=TORCH_DDP, build=DataParallel),
        Entry(name=DEEPSPEED_ZERO, build=DeepSpeed, library="deepspeed"),
        Entry(name=ONE_PROCESS, build=OneProcess, ranks=1),
    ),
}
