"""Checks a call of ``to_distributed``: its arguments, its plan for the model, and the launched processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from meshwright.data.loader import DistributedLoader
from meshwright.data.nested import why_no_batch
from meshwright.distribute.quantised import is_packed, is_quantised, method_of
from meshwright.errors import AlreadyDistributedError, PlanError
from meshwright.facts import Facts
from meshwright.faults.together import texts_of_all
from meshwright.mesh.host import check_is_alone
from meshwright.mesh.process_group import node_count, world_size
from meshwright.model_kinds import kind_of
from meshwright.optim.runtime import find_runtime
from meshwright.parallel.foreign_hooks import wrapper_of
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.plan.text import NO_SCALER
from meshwright.roles.blocks.experts import adapted_experts, experts_of_own_code, routed_modules

CALL = "to_distributed(model, optimizer, dataloader, plan=...)"


def check_arguments(model: object, optimizer: object, dataloader: object) -> None:
    """Check the types of the arguments, but not whether the arguments fit each other.

    Raises:
        PlanError: if a type is wrong; the message says what was passed, and what to write instead.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(_no_model(model))
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise PlanError(_no_optimizer(optimizer, dataloader))
    if dataloader is not None:
        _check_loader(dataloader)


def check_model(facts: Facts) -> None:
    """Raise if a model is already distributed, or has nothing to distribute.

    Raises:
        AlreadyDistributedError: if the model is distributed; the message says by what.
        PlanError: if the model has no parameters.
    """
    model = facts.model
    if (wrapper := next(filter(None, map(wrapper_of, facts.names)), None)) is not None:
        raise AlreadyDistributedError(
            f"the model is wrapped by {wrapper} already; pass the plain module (before wrapping it), and let "
            "ParallelPlan.dp and zero_stage do what the wrapper did"
        )
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:  # transformers has added hooks that move its inputs
        raise PlanError(
            f"the model was loaded with device_map, over {len(devices)} devices; load it without device_map: each rank "
            "moves its shard to its own device"
        )
    if find_runtime(model) is not None:
        raise AlreadyDistributedError(
            "this model was distributed by an earlier call; leave this call out, or build a new model to change the "
            "plan"
        )
    if inside := next((module for module in facts.names if find_runtime(module) is not None), None):
        raise AlreadyDistributedError(
            f"the {type(inside).__name__} in this {type(model).__name__} was distributed by an earlier call; wrap it "
            "(get_peft_model) first, and distribute the wrapped model"
        )
    parameters = facts.parameters
    if not parameters:
        raise PlanError(f"{type(model).__name__} has no parameters to distribute")
    for name, parameter in parameters.items():
        if hasattr(parameter, "meshwright"):
            raise AlreadyDistributedError(f"{name} is in a DataParallel or a sharded optimizer; build a new model")
        if hasattr(parameter, "placements"):
            raise AlreadyDistributedError(f"{name} is a DTensor already: the model was sharded by something else")


def explained(error: PlanError, facts: Facts, axes: Sequence[str]) -> PlanError:
    """Return the error for a model that these axes cannot cut; under tp it says what else the model can run."""
    model = facts.model
    if is_packed(facts):
        return error
    if is_quantised(model):
        return PlanError(
            f"{type(model).__name__} is quantised ({method_of(model)}), and weights of this kind cannot be cut over "
            f"{', '.join(axes)}; load it with BitsAndBytesConfig or without quantization_config, or train adapters "
            f"data-parallel: plan='dp2' ({error})"
        )
    if "tp" not in axes:
        return error
    if routed_modules(facts):
        shared = "" if experts_of_own_code(facts) else "plan='dp2 ep2', "
        sharded = "dp2 zero2" if adapted_experts(facts) else "dp2 zero3"
        cure = f"{type(model).__name__} has experts, and runs without tp: {shared}plan='{sharded}' or plan='pp2'"
        return PlanError(f"{str(error).removesuffix('.')}. {cure}")
    kind = kind_of(getattr(model, "config", None))
    if kind is None:
        return error
    return PlanError(
        f"{type(model).__name__} is {kind.what}: this tp cannot cut it. Leave tp out of the plan: plan='dp2', or "
        f"plan='dp2 zero3' if memory is short ({error})"
    )


def _no_model(model: object) -> str:
    must = "model must be a torch.nn.Module"
    if isinstance(model, type) and issubclass(model, nn.Module):
        return f"{must}, not the class {model.__name__}; make one: model = {model.__name__}(config)"
    if isinstance(model, str):
        return f"{must}, not the string {model!r}; load it: model = AutoModelForCausalLM.from_pretrained({model!r})"
    if hasattr(model, "model_type") and hasattr(model, "to_dict"):
        return f"{must}, not a {type(model).__name__}; make one: model = AutoModelForCausalLM.from_config(config)"
    if isinstance(model, Optimizer | DataLoader | Mapping | list | tuple):
        return f"{must}, not a {type(model).__name__}; the order is {CALL}"
    if callable(model) and not hasattr(model, "parameters"):
        return f"{must}, not the function {getattr(model, '__name__', model)!r}; call it, and pass what it returns"
    return f"{must}, not a {type(model).__name__}; the order is {CALL}"


def _no_optimizer(optimizer: object, dataloader: object) -> str:
    must = "optimizer must be a torch.optim.Optimizer"
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return f"{must}, not the class {optimizer.__name__}; make one: {optimizer.__name__}(model.parameters(), lr=...)"
    if isinstance(dataloader, Optimizer):
        return (
            f"optimizer is a {type(optimizer).__name__} and dataloader a {type(dataloader).__name__}: they are "
            f"swapped; write {CALL}"
        )
    if isinstance(optimizer, DataLoader):
        return (
            f"{must}, not a {type(optimizer).__name__}; without an optimizer write to_distributed(model, None, loader)"
        )
    if isinstance(optimizer, LRScheduler):
        return f"{must}, not a {type(optimizer).__name__}; pass scheduler.optimizer; the scheduler stays as it is"
    if isinstance(optimizer, ToDistributedConfig):
        return f"{must}, not a ToDistributedConfig; write to_distributed(model, config=...)"
    if isinstance(optimizer, ParallelPlan | str):
        return f"{must}, not {optimizer!r}; a plan is passed by name: to_distributed(model, plan=...)"
    if is_scaler(optimizer):
        return f"{must}, not a GradScaler; leave it out: {NO_SCALER}"
    if isinstance(optimizer, list | tuple):
        return (
            f"{must}, not a {type(optimizer).__name__} of {len(optimizer)}; pass one optimizer, with groups, or "
            "mw.ChainedOptimizer(first, second)"
        )
    return f"{must}, not a {type(optimizer).__name__}; the order is {CALL}"


def is_scaler(value: object) -> bool:
    """Return whether a value is a GradScaler of torch, or of a subclass such as FSDP's."""
    return any(kind.__name__ == "GradScaler" for kind in type(value).__mro__)


def _check_loader(loader: object) -> None:
    must = "dataloader must yield batches"
    kind = type(loader)
    if isinstance(loader, DistributedLoader):
        raise PlanError(
            "the dataloader was distributed by an earlier call, so its batches have this rank's rows and would be cut "
            "again. Leave it out, and go on with the loader that you have: model, optimizer, _ = "
            "to_distributed(model, optimizer)"
        )
    if isinstance(loader, type):
        raise PlanError(
            f"{must}, but it is the class {loader.__name__}; make one: {loader.__name__}(dataset, batch_size=8)"
        )
    if is_scaler(loader):
        raise PlanError(f"{must}, but is a GradScaler; leave it out: {NO_SCALER}")
    if isinstance(loader, list | tuple) and loader and (reason := why_no_batch(loader[0])):
        raise PlanError(f"{must}, but is a {kind.__name__} of {len(loader)} single samples: {reason}")
    if isinstance(loader, str | bytes | Tensor | Mapping | nn.Module | Optimizer | ParallelPlan | ToDistributedConfig):
        raise PlanError(f"{must}, as torch.utils.data.DataLoader does, but is a {kind.__name__}; the order is {CALL}")
    is_hf = kind.__module__.partition(".")[0] == "datasets"
    if (isinstance(loader, Dataset) and not isinstance(loader, DataLoader)) or is_hf:
        raise PlanError(
            f"{must}, but it is the dataset itself ({kind.__name__}), which may yield samples; wrap it: "
            "DataLoader(dataset, batch_size=8), or with batch_size=None if it yields whole batches, as a WebLoader does"
        )
    if isinstance(loader, Sampler):
        raise PlanError(
            f"{must}, but it is a {kind.__name__}; pass it to a loader: DataLoader(dataset, batch_sampler=...)"
        )


# The options of ToDistributedConfig that decide which collectives run; others, such as a folder, may differ by rank.
_OF_ALL_RANKS = ("gather_logits", "token_dispatcher", "bucket_size_mb", "compile", "check_replicas_every", "draws")


def check_devices(device_num: int | None, node_num: int | None) -> None:
    """Check the ``device_num`` and ``node_num`` of a call against the launched processes.

    Raises:
        PlanError: if two numbers differ; the message gives both numbers, and how to change either.
    """
    world = world_size()
    for name, value in (("device_num", device_num), ("node_num", node_num)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise PlanError(
                f"{name} must be a positive integer, not {value!r}. After the loader, pass arguments by name: "
                "to_distributed(model, optimizer, loader, plan=...). A scheduler is not passed; it keeps working"
                + (f". Leave the GradScaler out: {NO_SCALER}" if type(value).__name__ == "GradScaler" else "")
            )
    if device_num is None:
        check_is_alone()
    nodes = node_num or node_count()
    if device_num is not None and device_num * nodes != world:
        raise PlanError(
            f"device_num={device_num} x node_num={nodes} = {device_num * nodes} devices, but {world} process(es) "
            f"were launched; launch with: torchrun --nnodes {nodes} --nproc-per-node {device_num} SCRIPT"
        )
    if world % nodes:
        processes = f"{world} process{'es' if world > 1 else ''}"
        raise PlanError(
            f"node_num={nodes} nodes cannot share {processes} evenly; launch on {nodes} nodes with: torchrun --nnodes "
            f"{nodes} --nproc-per-node {device_num or 'N'} SCRIPT, or leave node_num out"
        )
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world // nodes))
    if node_num is not None and node_num != world // per_node:
        raise PlanError(
            f"node_num={node_num}, but the launcher started {per_node} of {world} processes on this node, which makes "
            f"{world // per_node} node(s); write node_num={world // per_node}, or leave it out"
        )


def check_launch(plan: ParallelPlan) -> None:
    """Check that as many processes were launched as the plan needs.

    Raises:
        PlanError: if the numbers differ; the message gives both numbers, and how to change either.
    """
    world = world_size()
    if plan.world_size != world:
        copies, rest = divmod(world * plan.dp, plan.world_size)
        other = "change the sizes of ParallelPlan"
        with contextlib.suppress(PlanError):  # experts may not be spread over that many ranks
            if not rest:
                other = f"write plan={dataclasses.replace(plan, dp=copies).label!r}"
        needed = f"{plan.world_size} process{'es' * (plan.world_size > 1)}"
        raise PlanError(
            f"the plan {plan.product()} needs {needed}, but {world} were launched; {other}, or "
            f"launch with: torchrun --nproc-per-node {plan.world_size} SCRIPT\n"
            f"The plan's ranks:\n{plan.dims.rank_grid()}"
        )


def check_agreement(plan: ParallelPlan, config: ToDistributedConfig) -> None:
    """Check that all ranks have the same plan and options, before they make collectives that would not match.

    Raises:
        PlanError: on every rank, if they differ; the message shows what two of the ranks have.
    """
    if not dist.is_initialized() or world_size() == 1:
        return
    options = ", ".join(f"{name}={getattr(config, name)!r}" for name in _OF_ALL_RANKS)
    ranks = [text.split("\n") for text in texts_of_all(f"{plan}\n{options}")]
    for what, texts in zip(("plans", "options"), zip(*ranks, strict=True), strict=True):
        for rank, other in enumerate(texts):
            if other != texts[0]:
                raise PlanError(
                    f"the ranks were given different {what}; rank 0: {texts[0]}, rank {rank}: {other}. Every process "
                    "must make the same call"
                )
