"""Callbacks for a Trainer that show a run, compare replicas and balance experts."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerState, TrainingArguments

from meshwright import balance_experts, expert_counts
from meshwright.choose.given_plan import PLAN_VARIABLE
from meshwright.choose.model_sizes import describe_model, kind_of
from meshwright.choose.picked_plan import device_at_hand, plan_card
from meshwright.distribute.decide import call_of, runnable_plans
from meshwright.errors import DivergenceError, PlanError
from meshwright.faults.memory_digest import memory_digest
from meshwright.mesh.process_group import world_size
from meshwright.monitor.held_memory import peak_memory
from meshwright.optim.runtime import device_of, find_runtime
from meshwright.parallel.fake_passes.routed_shape import on_meta
from meshwright.plan.config import ToDistributedConfig
from meshwright.roles.adapters import without_wrappers


class BalanceExperts(TrainerCallback):
    """Updates the biases that correct the routing after each step, as DeepSeek-V3 does.

    Args:
        rate: the size of the update; see ``meshwright.balance_experts``.

    Attributes:
        counts: the tokens of each expert in the last step, by module of experts.

    Example::

        trainer = MeshwrightTrainer(model, args, plan=plan, train_dataset=data, callbacks=[BalanceExperts(rate=1e-3)])
    """

    def __init__(self, *, rate: float = 1e-3):
        self.rate = rate
        self.counts: dict[str, Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: object) -> None:
        """Begin to count."""
        self.counts = expert_counts(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: object) -> None:
        """Move the biases by the tokens of the step."""
        self.counts = expert_counts(model)
        balance_experts(model, self.counts, rate=self.rate)


def check_replicas(model: nn.Module, *, step: int) -> None:
    """Raise if a value differs between ranks that must hold it equally, by digests; every rank makes the call.

    A model that ``to_distributed`` or ``mw.DataParallel`` has distributed has a comparison of its own, which knows what
    its ranks share. In other models, as under DDP, all ranks hold the same weights; DDP sends the buffers of rank 0 to
    all ranks in each pass. A model whose weights an engine shards (FSDP, DeepSpeed stage 3) is not checked.

    Raises:
        DivergenceError: on every rank, if values differ; the message names the first one that differs and the ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if (runtime := find_runtime(model)) is not None:
        runtime.compare_replicas()
        return
    parameters = dict(model.named_parameters())
    is_fsdp = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    if is_fsdp or any(hasattr(p, "placements") or hasattr(p, "ds_id") for p in parameters.values()):
        return
    own = torch.stack([memory_digest(p) for p in parameters.values()])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    for index, name in enumerate(parameters):
        if differ := [rank for rank, theirs in enumerate(everyone) if not torch.equal(theirs[index], own[index])]:
            raise DivergenceError(
                f"step {step}: rank(s) {', '.join(map(str, differ))} have other values of {name} than rank "
                f"{dist.get_rank()}, but must have equal values: something changed the weights, or a gradient, on one "
                "rank alone (a clip by a local norm, a batch that only one rank skipped, a module left out of the "
                "wrapper)"
            )


logger = logging.getLogger(__name__)


class MeshwrightCallback(TrainerCallback):
    """Adds throughput and memory figures, the planner's plan and a comparison of the replicas' weights to any Trainer.

    Each log of the training loss gets ``tokens_per_second`` and ``mfu`` over all devices since the last log, and the
    largest ``peak_memory_gib`` of all ranks. Reporting integrations (``report_to``) run before a user's callbacks, so
    they do not get these figures. The printed logs and ``state.log_history`` have them. MeshwrightTrainer logs such
    figures itself, so there the callback adds none.

    The callback cannot shard the model, because the Trainer has wrapped the model before it calls a callback. In a
    stock Trainer with several processes, a warning says this and shows the line to change.

    Args:
        check_every: the number of steps between two comparisons of the replicas' weights; 0 turns them off.
        shows_plan: whether to log the plan that the planner would pick, when training begins.

    Example::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[MeshwrightCallback()])
    """

    def __init__(self, *, check_every: int = 100, shows_plan: bool = True):
        if not isinstance(check_every, int) or check_every < 0:
            raise ValueError(
                f"MeshwrightCallback(check_every={check_every!r}) must be a number of steps, or 0 for never"
            )
        self.check_every, self.shows_plan = check_every, shows_plan
        self.trainer_shards = False  # MeshwrightTrainer sets it before it makes the Trainer
        self._tokens = self._length = 0
        self._since = 0.0
        self._hook: RemovableHandle | None = None
        self._flops: Callable[[int], float] | None = None  # FLOPs per token, by the length of its row
        self._peak: float | None = None  # FLOPs per second of a device

    def on_init_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """Warn that this callback does not shard the model, if several processes or a plan were launched."""
        has_plan = world_size() > 1 or PLAN_VARIABLE in os.environ
        if has_plan and not self.trainer_shards and state.is_world_process_zero:
            logger.warning(
                "MeshwrightCallback only watches this Trainer. It cannot shard the model: a callback sees it after the "
                "Trainer has wrapped it. To train by a plan, change the line that makes the Trainer:\n"
                "  - trainer = Trainer(...)\n"
                "  + trainer = meshwright_hf.trainer.MeshwrightTrainer(...)"
            )

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **given: Any) -> None:
        """Count tokens from here on, and log the plan card."""
        model: nn.Module = given["model"]
        device = device_of(model)
        if self.shows_plan and state.is_world_process_zero:
            optimizer = getattr(given.get("optimizer"), "optimizer", given.get("optimizer"))  # accelerate wraps it
            self._log_plan(args, model, given["train_dataloader"], device, optimizer)
        if self.trainer_shards:
            return
        try:
            self._flops = describe_model(model, ToDistributedConfig()).flops
        except (PlanError, AttributeError) as error:
            logger.info("no MFU: %s", error)
        # The peak FLOPs of a CPU are not known.
        self._peak = None if device.type == "cpu" else device_at_hand(device).flops
        self._count_tokens_of(args, model)
        if device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(device)
        self._since = time.perf_counter()

    def on_step_end(self, args: object, state: TrainerState, control: object, **given: Any) -> None:
        """Compare the replicas' weights every ``check_every`` steps."""
        if self.check_every and state.global_step % self.check_every == 0:
            check_replicas(given["model"], step=state.global_step)

    def on_log(self, args: object, state: TrainerState, control: object, **given: Any) -> None:
        """Add throughput and memory figures to a log of the training loss."""
        logs, model = given.get("logs"), given.get("model")
        if logs is None or "loss" not in logs or model is None or self.trainer_shards:
            return  # MeshwrightTrainer has added its own figures, which cost no collective
        now = time.perf_counter()
        added = self._telemetry(model, now - self._since)
        self._tokens, self._length, self._since = 0, 0, now
        logs.update(added)
        if state.log_history:
            state.log_history[-1].update(added)

    def on_train_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        """Remove the hook from the model."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _log_plan(
        self,
        args: TrainingArguments,
        model: nn.Module,
        loader: DataLoader[object],
        device: torch.device,
        optimizer: Optimizer | None,
    ) -> None:
        runtime = find_runtime(model)
        replicas = world_size() if runtime is None else runtime.mesh.dp.size
        rows = args.train_batch_size * args.gradient_accumulation_steps * replicas
        try:
            if runtime is None:
                call = call_of(model, ToDistributedConfig(), optimizer, device)
            else:  # the forward of a distributed model has the collectives of all ranks, and one rank asks
                call = call_of(on_meta(without_wrappers(model)[1]), ToDistributedConfig(), None, device)
            card = plan_card(runnable_plans(call), loader, rows=rows, optimizer=kind_of(optimizer, model))
        except PlanError as error:
            card = f"no plan: {error}"
        if runtime is not None and runtime.plan is not None:
            card += f"\n  in use: {runtime.plan}"
        logger.warning("MeshwrightCallback: the planner's choice for this run\n%s", card)

    def _count_tokens_of(self, args: TrainingArguments, model: nn.Module) -> None:
        self._tokens = self._length = 0
        if self._hook is not None:
            self._hook.remove()
        self._hook = None
        if args.torch_compile:
            logger.info("no tokens/s under torch_compile: a hook that counts them would be compiled in every step")
            return
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if model.training and torch.is_grad_enabled() and isinstance(ids, Tensor):
            self._tokens += ids.numel()
            self._length = max(self._length, ids.shape[-1])

    def _telemetry(self, model: nn.Module, elapsed: float) -> dict[str, float]:
        """Return the throughput and memory figures of all ranks, which all log at the same step."""
        device = device_of(model)
        own = torch.tensor([self._tokens, self._length, peak_memory(device)], dtype=torch.float64, device=device)
        ranks = own[None]
        if dist.is_initialized() and dist.get_world_size() > 1:
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, own)
            ranks = torch.stack(parts)
        runtime = find_runtime(model)
        copies = 1 if runtime is None else runtime.mesh.row_copies  # number of ranks with the same rows
        found = {"peak_memory_gib": round(ranks[:, 2].max().item() / 2**30, 3)}
        tokens, length = ranks[:, 0].sum().item() / copies, int(ranks[:, 1].max())
        if self._hook is not None and elapsed > 0:
            found["tokens_per_second"] = round(tokens / elapsed, 1)
            if self._flops is not None and self._peak is not None and length:
                done = tokens * self._flops(length) / elapsed
                found["mfu"] = round(done / (self._peak * len(ranks)), 4)
        return found
