"""Checks and corrections for TRL's trainers and their fused head, which assume that no ranks share rows or hold parts
of weights.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
from collections.abc import Mapping, Sized
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from meshwright.choose.given_plan import given_plan
from meshwright.context.region import ContextRegion
from meshwright.errors import PlanError
from meshwright.layout.tensor_layout import layout_of
from meshwright.mesh.process_group import world_size
from meshwright.optim.runtime import Runtime
from meshwright.parallel.batch.mean_over_ranks import valid_labels
from meshwright.parallel.collectives import unsplit_rows
from meshwright.parallel.experts.load_balancing import ExpertCounts, LoadBalancing
from meshwright.parallel.method_chain import ChainStep, StepOrder, add_step, find_step
from meshwright.plan.config import ToDistributedConfig
from meshwright_hf.trainer.checks import StockTrainer
from meshwright_hf.trainer.data import evaluated_rows

_MIXTRAL = "transformers.models.mixtral.modeling_mixtral"


def gather_for_fused_head(model: Any, runtime: Runtime) -> None:
    """Gather the whole head for calls of the forward with ``fused_lm_head=True``; other calls are unchanged.

    TRL's trainers replace the model's forward before the model is sharded. TRL's forward multiplies hidden states by
    ``get_output_embeddings().weight`` tile by tile, so with a rank's own rows the softmax would cover only part of the
    vocabulary. Under ZeRO stage 3 the head has values only during its own forward, which TRL does not call.

    Args:
        model: the model, changed in place.
        runtime: the model's runtime; nothing is changed if each rank has the whole head.
    """
    is_whole = runtime.mesh.tp.size == runtime.mesh.cp.size == 1 and runtime.weights is None
    if is_whole or not hasattr(model, "get_output_embeddings"):
        return
    owner = _owner(model)
    add_step(owner, _WholeHead(owner, runtime))


def balance_fused_head(model: Any, runtime: Runtime) -> None:
    """Make the load-balancing loss that TRL's forward computes with Mixtral's function that of the global batch.

    Args:
        model: the model, changed in place.
        runtime: the model's runtime; nothing is changed if the model has no experts.
    """
    owner = _owner(model)
    if runtime.features.find(ExpertCounts) is None or runtime.mesh.size == 1:
        return
    if (step := find_step(owner, LoadBalancing)) is None:
        add_step(owner, _NoRouterLoss())
    elif _MIXTRAL not in step.modules:
        importlib.import_module(_MIXTRAL)
        step.modules.append(_MIXTRAL)


def _owner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class _NoRouterLoss(ChainStep):
    """The step of a model's forward that refuses a load-balancing loss which only TRL's forward computes."""

    order = StepOrder.WHOLE_HEAD

    def __call__(self, *args: object, **kwargs: object) -> object:
        if kwargs.get("fused_lm_head") and kwargs.get("output_router_logits"):
            raise PlanError(
                "TRL computes a load-balancing loss that the model's own forward does not have, from each rank's own "
                "tokens. Turn it off: router_aux_loss_coef=0.0 in the trainer's config"
            )
        return self.method(*args, **kwargs)


class _WholeHead(ChainStep):
    """The step of a model's forward that gathers the head where TRL's forward reads it."""

    order = StepOrder.WHOLE_HEAD

    def __init__(self, owner: Any, runtime: Runtime):
        self.owner, self.runtime = owner, runtime

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not kwargs.get("fused_lm_head"):
            return self.method(*args, **kwargs)
        owner, runtime = self.owner, self.runtime
        find_head = owner.get_output_embeddings
        with contextlib.ExitStack() as stack:
            if (region := runtime.features.find(ContextRegion)) is not None:
                stack.enter_context(region.joining())  # TRL's loss shifts the labels of the whole row

            def find_whole_head() -> SimpleNamespace:
                head = find_head()
                if runtime.weights is not None:
                    stack.enter_context(runtime.weights.lent(head))
                return _whole(head, runtime)

            owner.get_output_embeddings = find_whole_head  # TRL's forward calls this once, after the backbone
            try:
                return self.method(*args, **kwargs)
            finally:
                del owner.get_output_embeddings


def _whole(head: nn.Linear, runtime: Runtime) -> SimpleNamespace:
    """Return the whole head. All ranks compute the same gradient for it, so each rank keeps its own rows."""
    bias = None if head.bias is None else _gathered(head.bias, runtime)
    return SimpleNamespace(weight=_gathered(head.weight, runtime), bias=bias)


def _gathered(parameter: Tensor, runtime: Runtime) -> Tensor:
    layout = layout_of(parameter)
    if not layout.is_sharded:
        return parameter
    assert layout.over("tp").dim == 0
    return unsplit_rows(parameter.as_subclass(Tensor), runtime.mesh.tp)[: layout.shape[0]]


logger = logging.getLogger(__name__)

_MEANS_OVER_ROWS = {"dpo_trainer", "kto_trainer", "reward_trainer"}
_MEANS_OVER_RANKS = {
    "kto_trainer": "the KL estimate, which is a part of the loss",
    "reward_trainer": "the accuracy and the margin that it logs",
}


def check_trl(trainer: StockTrainer, runtime: Runtime) -> None:
    """Raise if a TRL trainer would train wrongly under the model's plan.

    Raises:
        PlanError: if it would; the message names the trainer or the argument, and the plan to use instead.
    """
    args, tp, name = trainer.args, runtime.mesh.tp.size, type(trainer).__name__
    if runtime.mesh.pp.size > 1 and any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__):
        raise PlanError(
            f"{name} computes its loss from the model's hidden states or logits, but under "
            f"ParallelPlan.pp={runtime.mesh.pp.size} the backward pass runs inside the model's forward, so the loss "
            "must be the model's own. Use pp=1, or a MeshwrightTrainer that is not one of TRL's trainers"
        )
    if tp > 1 and _generates(type(trainer)):
        raise PlanError(
            f"{name} generates what it trains on, but the plan has tp={tp}: TRL seeds each process differently, so "
            f"the {tp} ranks that share a prompt would train on different completions, and TRL would gather their "
            "rewards as if the prompts were different. Set ParallelPlan(tp=1, dp=..., zero_stage=3), which shards the "
            "weights too"
        )
    keeps_parts = tp > 1 or runtime.weights is not None
    why = f"tp={tp}" if tp > 1 else "zero_stage=3"
    if keeps_parts and getattr(args, "sync_ref_model", False):
        raise PlanError(
            f"sync_ref_model=True copies the model's parameters into the reference model, but with {why} a rank holds "
            "a part of them; set sync_ref_model=False, or ParallelPlan(tp=1, zero_stage=2)"
        )
    if keeps_parts and getattr(args, "use_vllm", False):
        raise PlanError(
            f"use_vllm=True sends the model's parameters to vLLM, but with {why} a rank holds a part of them; set "
            "use_vllm=False, or ParallelPlan(tp=1, zero_stage=2)"
        )


def evaluated_over(trainer: StockTrainer, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return how many labels or rows this rank's evaluation loss averages over; None if this is unknown.

    It is known for those of TRL's trainers that do not divide the loss by the count of all ranks.

    Args:
        trainer: any trainer.
        inputs: this rank's batch.
    """
    modules = _modules_of(trainer)
    if "sft_trainer" in modules:
        return valid_labels(inputs["labels"][..., 1:]) if "labels" in inputs else None
    rows = evaluated_rows()
    return None if rows is None or not modules & _MEANS_OVER_ROWS else torch.tensor(rows)


def check_last_batch(trainer: StockTrainer, loader: DataLoader[Any], dp: int, *, is_training: bool) -> None:
    """Raise for an uneven last batch if TRL uses the mean of the ranks' means in the loss; warn if TRL only logs it.

    Args:
        trainer: any trainer.
        loader: one rank's loader, as the trainer built it.
        dp: the number of data-parallel ranks.
        is_training: whether the loader is for training.

    Raises:
        ValueError: if the loss would differ from that on one device.
    """
    averaged = [module for module in _MEANS_OVER_RANKS if module in _modules_of(trainer)]
    if dp == 1 or not averaged or loader.drop_last or not isinstance(loader.dataset, Sized):
        return
    if loader.batch_size is None:  # the program's own batch sampler
        return
    rows, size = len(loader.dataset), loader.batch_size * dp
    if rows % size % dp == 0:
        return
    message = (
        f"{type(trainer).__name__} takes the mean over the ranks of {_MEANS_OVER_RANKS[averaged[0]]}. Of {rows} rows "
        f"in batches of {size} the last {rows % size} are not divisible by dp={dp}, so a row has a larger weight on a "
        "rank with fewer rows. Set dataloader_drop_last=True, or give the trainer a divisible number of rows"
    )
    passes = trainer.args.max_steps * trainer.args.gradient_accumulation_steps
    is_reached = passes <= 0 or passes >= -(-rows // size)
    if is_training and not is_reached:
        return
    if is_training and "kto_trainer" in averaged:
        raise ValueError(message)
    logger.warning(message)


def _modules_of(trainer: StockTrainer) -> set[str]:
    """Return the names of the TRL modules that define the base classes of a trainer."""
    return {kind.__module__.removeprefix("trl.trainer.") for kind in type(trainer).__mro__}


def _generates(kind: type) -> bool:
    """Return whether a TRL trainer generates during training; some only in evaluation (generate_from_model)."""
    own = (parent for parent in kind.__mro__ if parent.__module__.startswith("trl."))
    return any(name.startswith(("_generate", "generate_on_policy")) for parent in own for name in vars(parent))


def with_global_batch(args: TrainingArguments, config: ToDistributedConfig) -> Any:
    """Return a copy of KTO's arguments with the global batch size, for pairing the rows of a batch before sharding.

    For KTO's KL estimate, one process with a batch that is dp times as large pairs the rows of all data-parallel ranks.

    Raises:
        PlanError: if no plan is given, so that dp is not known yet.
    """
    plan = given_plan(config)
    if plan is None and world_size() > 1:
        raise PlanError(
            "this trainer estimates the KL term from completions that it exchanges within a global batch, when it is "
            "made, but the planner has picked no plan by then; pass one: meshwright=ParallelPlan(dp=..., tp=...)"
        )
    args = copy.copy(args)
    args.per_device_train_batch_size *= 1 if plan is None else plan.dp
    return args


def whole_loader(loader: DataLoader[Any], device: torch.device) -> Any:
    """Return a loader of all rows on every rank, for a pass before sharding (precompute_ref_log_probs)."""
    return prepare_data_loader(loader, device, num_processes=1, process_index=0, put_on_device=True)
