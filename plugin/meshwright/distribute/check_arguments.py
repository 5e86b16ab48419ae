"""Checks a call of ``to_distributed``: its arguments, its plan for the model, and the launched processes."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from meshwright.data.loader import DistributedLoader
from meshwright.data.nested import why_no_batch
from meshwright.distribute.quantised import is_packed, is_quantised, method_of
from meshwright.errors import AlreadyDistributedError, PlanError
from meshwright.facts import Facts
from meshwright.mesh.host import check_is_alone
from meshwright.mesh.process_group import node_count, world_size
from meshwright.model_kinds import kind_of
from meshwright.optim.runtime import find_runtime
from meshwright.parallel.experts.routers import OPTION
from meshwright.parallel.foreign_hooks import wrapper_of
from meshwright.parallel.forward.recompute import check_recompute
from meshwright.parallel.losses.causal_lm import BatchLoss
from meshwright.parallel.losses.head_losses import LossKind
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


def check_plan(facts: Facts, plan: ParallelPlan, engine: str | None, loss: LossKind | BatchLoss | None) -> None:
    """Raise if the parts of a plan do not go with a training engine, a model's loss or its layers.

    Args:
        facts: what the model without adapters around it shows.
        plan: the plan.
        engine: the training engine; see ``ToDistributedConfig.engine``.
        loss: the kind of the model's loss, or what computes it if the model is distributed already; None if it is not
            known what it averages over.

    Raises:
        PlanError: if they do not; the message says what to write instead.
    """
    alone = "or train without the engine: to_distributed(model, optimizer, loader)"
    kept_by_engine = (
        (plan.pp > 1, f"pp={plan.pp}", f": its engine runs the backward pass of the whole model, and a pipeline runs "
         f"its own; use pp=1, {alone}"),
        (plan.cp > 1, f"cp={plan.cp}", f": its engine averages gradients over dp alone, and each rank of cp has those "
         f"of its own tokens; use cp=1, {alone}"),
        (plan.ep * plan.etp > 1, f"ep={plan.ep} and etp={plan.etp}", ", which was not compared with one device; use "
         f"ep=1 and etp=1, {alone}"),
        (plan.reduce_dtype, f"reduce_dtype={plan.reduce_dtype!r}", ", which reduces the gradients itself; leave it "
         "out, and set the engine's own option (in DeepSpeed's config, communication_data_type)"),
        (plan.offload, f"offload={plan.offload!r}", ", which keeps the optimizer itself; leave it out, and set the "
         "engine's own option (in DeepSpeed's config, zero_optimization.offload_optimizer)"),
    )  # fmt: skip
    for is_on, written, why in kept_by_engine if engine is not None else ():
        if is_on:
            raise PlanError(f"ParallelPlan.{written} with {engine}{why}")
    model = facts.model
    trained = [p for p in facts.parameters.values() if p.requires_grad and p.is_floating_point()]
    if plan.reduce_dtype and plan.zero_stage == 0 and trained and all(p.element_size() <= 2 for p in trained):
        raise PlanError(
            f"ParallelPlan.reduce_dtype={plan.reduce_dtype!r} saves nothing: with zero_stage=0 the gradients of "
            f"{str(trained[0].dtype).removeprefix('torch.')} weights travel in 16 bits already; leave it out"
        )
    counted = "Set ToDistributedConfig(loss_averages_over='rows'), 'labels' or a callable that counts in a batch; or"
    if plan.pp > 1 and loss is None:
        raise PlanError(
            f"ParallelPlan.pp={plan.pp} runs the backward pass inside the model's forward, but what the loss of "
            f"{type(model).__name__} averages over is not known. {counted} use pp=1"
        )
    if plan.has_micro_batches and loss is None:
        raise PlanError(
            f"the plan splits the batch into micro-batches, but what the loss of {type(model).__name__} averages over "
            f"is not known, so the losses of the micro-batches cannot be combined. {counted} set "
            "gradient_accumulation_steps=1 and micro_batch_size=None"
        )
    has_parts = plan.dp * plan.cp * plan.pp > 1 or plan.has_micro_batches
    is_wanted = getattr(getattr(model, "config", None), OPTION, False)
    is_function = isinstance(loss, BatchLoss) or (loss is not None and loss.is_function)
    if has_parts and is_wanted and not is_function and OPTION in inspect.signature(model.forward).parameters:
        raise PlanError(
            f"model.config.{OPTION}=True: {type(model).__name__} adds a load-balancing loss to its loss, which is a "
            "product of means over all tokens of the batch, and computes it from the tokens that it has. Set "
            f"model.config.{OPTION} = False, or use dp=1, cp=1 and pp=1 without micro-batches"
        )
    if plan.recompute == "full":
        check_recompute(model, plan.recomputed_layers)
    if plan.weight_axes or plan.zero_stage:
        _check_memory(facts)


def _check_memory(facts: Facts) -> None:
    """Raise if two parameters are views of the same elements, which a rank's own memory of each would take apart."""
    storages: dict[int, list[tuple[str, nn.Parameter]]] = {}
    firsts = {x: name for name, x in reversed(facts.parameters.items())}
    for x, name in reversed(firsts.items()):
        if type(x) is nn.Parameter and x.numel() and not x.is_meta and x.layout is torch.strided:
            storages.setdefault(x.untyped_storage()._cdata, []).append((name, x))
    for views in storages.values():
        for one, other in _overlapping(views):
            raise PlanError(
                f"{one} and {other} are two parameters of one memory, of which a step on one device changes both "
                "by the gradient of each, and the plan gives each a memory of its own. Make them one parameter, "
                "a.weight = b.weight, or two, b.weight.data = b.weight.data.clone(); or use ParallelPlan(dp=...) alone"
            )


def _overlapping(views: Sequence[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, str]]:
    """Yield the names of two parameters of one storage that have an element in common, unless both are frozen."""
    extents = [_extent(x) for _, x in views]
    order = sorted(range(len(views)), key=extents.__getitem__)
    for place, first in enumerate(order):
        for second in order[place + 1 :]:
            if extents[second][0] >= extents[first][1]:
                break  # nor does a later one reach into the first
            (one, x), (other, y) = views[min(first, second)], views[max(first, second)]
            memory = np.empty(max(extents[first][1], extents[second][1]), np.uint8)  # never written, so it takes none
            if (x.requires_grad or y.requires_grad) and np.shares_memory(_bytes(x, memory), _bytes(y, memory)):
                yield one, other


def _bytes(x: Tensor, memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bytes that a tensor has of a storage, as a view of a memory like it: views may interleave."""
    size = x.element_size()
    strides = (*(n * size for n in x.stride()), 1)
    return np.lib.stride_tricks.as_strided(memory[x.storage_offset() * size :], (*x.shape, size), strides)


def _extent(x: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the end of the last."""
    start, last = int(x.storage_offset()), sum((size - 1) * n for size, n in zip(x.shape, x.stride(), strict=True))
    return start * x.element_size(), (start + last + 1) * x.element_size()


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
