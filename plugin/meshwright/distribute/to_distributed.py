"""``to_distributed`` distributes a one-device program's model, optimizer and loader, also a model that was compiled
before.

A compiled module only calls the plain one, so the program's object stays valid while the plain one is distributed in
place. From then on it compiles what ``torch.compile`` compiles of any distributed model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from meshwright.checkpoint.format.load_weights import settled
from meshwright.choose.given_plan import config_with, given_plan, plan_in_model, source_of_plan
from meshwright.choose.picked_plan import pick_plan, tell_reasons
from meshwright.compiling import is_compiled_function, without_compilation
from meshwright.construct.initial_weights import InitialWeights
from meshwright.context.handed_states import hands_states
from meshwright.data.loader import DistributedLoader, made_together
from meshwright.data.peers import LoaderMesh
from meshwright.distribute.attach_optimizer import complete, plan_to_complete
from meshwright.distribute.check_arguments import (
    check_arguments,
    check_devices,
    check_launch,
    check_model,
)
from meshwright.distribute.decide import call_of, decide, runnable_plans
from meshwright.distribute.installation import REFUSALS_LATER, distribute
from meshwright.distribute.meeting import CallStatement, meet
from meshwright.distribute.quantised import finish_loading
from meshwright.distribute.rehearse import rehearsed
from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.faults.collective_log import set_timeouts
from meshwright.faults.equal_errors import say_equal_texts_once
from meshwright.faults.guard import Guard, start_guard
from meshwright.features.decision import Build, Call, Decision, refuse
from meshwright.mesh.axes import Mesh
from meshwright.mesh.host import check_device_num, warn_of_unused_gpus
from meshwright.mesh.process_group import device_for, start_process_group
from meshwright.monitor.monitor import Preparation, start_monitor
from meshwright.optim.gradients import Engine
from meshwright.optim.runtime import Runtime, Watch, WholeLogits, device_of, find_runtime
from meshwright.optim.state_dicts import check_ownership
from meshwright.parallel.batch.flash_rows import flash_function, flash_implementation
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.losses.causal_lm import BatchLoss, CausalLMLoss
from meshwright.parallel.tensor_parallel.float8 import plain_weights
from meshwright.plan.config import IN_PLAN, ParallelPlan, PlanLike, ToDistributedConfig
from meshwright.plan.fields import either_name, names_checked
from meshwright.plan.text import CALL_NAMES
from meshwright.progress import is_first_rank
from meshwright.roles.adapters import without_wrappers, wrapped


@contextlib.contextmanager
def plain_module(model: nn.Module, facts: Facts) -> Iterator[Facts]:
    """Yield what the plain module of a model shows, to be distributed in place, without compiled modules in it.

    A child that ``torch.compile(child)`` wrapped is put back into its parent and compiled by ``child.compile()`` with
    the same arguments, so that parameters have one-device names. If the body raises, every wrapper returns to its
    place.

    Args:
        model: the program's model, plain, or compiled as a whole or in parts.
        facts: what the module in it shows.
    """
    undo = contextlib.ExitStack()
    is_compiled = facts.model is not model or any(module._compiled_call_impl is not None for module in facts.names)
    has_compiled_parts = False
    for parent in facts.names:
        for name, child in parent._modules.items():
            if child is not None and (plain := without_compilation(child)) is not child:
                is_compiled = has_compiled_parts = True
                undo.callback(parent._modules.__setitem__, name, child)
                parent._modules[name] = plain
                called = facts.model if plain is _innermost(facts.model) else plain
                undo.callback(setattr, called, "_compiled_call_impl", called._compiled_call_impl)
                compiler: Any = child.dynamo_ctx
                called._compiled_call_impl = compiler(called._call_impl)  # as called.compile() does
    with undo:
        yield Facts(facts.model) if has_compiled_parts else facts
        undo.pop_all()
    if is_compiled:
        # Graphs of calls before this one are of the plain program, and count against dynamo's limit of variants.
        torch.compiler.reset()


def check_compiled(model: nn.Module, facts: Facts, engine: str | None = None) -> None:
    """Raise a PlanError if the runtime's hooks would be inside the code that the program has compiled.

    Args:
        model: the program's model.
        facts: what the plain module in it shows.
        engine: the training engine that adds hooks of its own; see ``ToDistributedConfig.engine``.
    """
    for module, name in ((model, ""), *facts.names.items()):
        owner = f"model.{name}" if name else "model"
        if is_compiled_function(vars(module).get("forward")) and not _is_wrapper(module):
            raise PlanError(
                f"{owner}.forward is a function that torch.compile made, and would run inside one graph with the "
                f"plan's collectives; write {owner}.compile(...) instead of {owner}.forward = torch.compile("
                f"{owner}.forward, ...)"
            )
        if engine is not None and (module._compiled_call_impl is not None or _is_wrapper(module)):
            raise PlanError(
                f"the model is compiled ({owner}), but {engine} adds its own hooks to the modules; pass the plain "
                "module, and leave torch.compile out"
            )


def _innermost(model: nn.Module) -> nn.Module:
    """Return the module inside PEFT's wrappers, which call its forward and not the module itself."""
    while (child := wrapped(model)) is not None:
        model = without_compilation(child[1])
    return model


def _is_wrapper(module: nn.Module) -> bool:
    return without_compilation(module) is not module


logger = logging.getLogger(__name__)


_IN_CONFIG = {
    field.name: f"config=ToDistributedConfig({field.name}=VALUE)" for field in dataclasses.fields(ToDistributedConfig)
}


@names_checked(IN_PLAN | CALL_NAMES | _IN_CONFIG)
def to_distributed(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    dataloader: Iterable[Any] | None = None,
    device_num: int | None = None,
    node_num: int | None = None,
    config: ToDistributedConfig | None = None,
    *,
    plan: PlanLike | None = None,
    loader: Iterable[Any] | None = None,
) -> tuple[Any, Any, Any]:
    """Turn a one-device program into a distributed one; its training loop stays as it is.

    If no plan is given, the plan in the model's config is used. If there is none, the planner picks the fastest plan
    that fits, and logs it. Every launched process must make the call with the same arguments. The model and the
    optimizer are changed in place and returned. If the call raises, nothing has changed.

    A model that was distributed without an optimizer, by this call or while loading, may be passed again with an
    optimizer over its parameters and with a loader. The model's plan is then used.

    Args:
        model: a causal LM of transformers, or a model of the same structure. It is either whole on this process's
            device, or without memory (built under ``deferred_init`` or on the meta device). Without memory, each rank
            makes only its shard, on CUDA if available.
        optimizer: the optimizer over the model's parameters; its groups and its state are kept.
        dataloader: a loader of global batches, of the size that one device would train on.
        device_num: the number of devices per node; None for the launched number.
        node_num: the number of nodes; None for the launched number.
        config: the options, and the plan if ``plan`` is None.
        plan: the parallel plan: a ParallelPlan, its words as the planner prints them ("dp2 tp2+sp zero1"), a dict of
            its fields, the path of a plan file, or "auto" to have the planner pick.
        loader: another name for ``dataloader``.

    Returns:
        The model, the optimizer and a loader of this rank's rows. An argument that was None stays None.

    Raises:
        PlanError: if the model, the launch or this version cannot run the plan, or no plan fits.
        AlreadyDistributedError: if DDP, FSDP, DeepSpeed or an earlier call has distributed the model.
        OptimizerMismatchError: if the optimizer belongs to another model, or its step on a shard may differ from
            its step on the whole tensor.
        CheckpointError: if the checkpoint ``config.weights`` cannot be read or belongs to another model.
        UninitialisedParameterError: if nothing initialises a model on the meta device.

    Example::

        model, optimizer, loader = mw.to_distributed(model, optimizer, loader, plan="dp2 tp2+sp zero1")
    """
    say_equal_texts_once()
    config = config_with(config, plan)
    dataloader = either_name("to_distributed", dataloader, loader)
    check_arguments(model, optimizer, dataloader)
    if config.logging_steps is None and (config.logging_dir is not None or config.max_steps is not None):
        field = "logging_dir" if config.logging_dir is not None else "max_steps"
        raise PlanError(f"ToDistributedConfig.{field} is used in status lines only; set logging_steps=10 too")
    if config.compile is None and config.compile_options is not None:
        raise PlanError('ToDistributedConfig.compile_options is used by compile="layers" only; set it too')
    facts = Facts(without_compilation(model))
    check_compiled(model, facts, config.engine)
    with plain_module(model, facts) as plain, plain_weights(plain):
        optimizer, rows = _distribute(plain, optimizer, dataloader, device_num, node_num, config)
    return ReturnedTuple((model, optimizer, rows))


def _distribute(
    facts: Facts,
    optimizer: Optimizer | None,
    dataloader: Iterable[Any] | None,
    device_num: int | None,
    node_num: int | None,
    config: ToDistributedConfig,
) -> tuple[Optimizer | None, DistributedLoader | None]:
    """Distribute a model in place, and return the optimizer and a loader of this rank's rows."""
    check_devices(device_num, node_num)
    if (runtime := find_runtime(facts.model)) is not None and (optimizer is not None or dataloader is not None):
        return _complete(facts, runtime, optimizer, dataloader, config)
    # Until the ranks meet, each decides by itself, and changes nothing.
    facts = _look(facts, optimizer)
    device = device_for(_starting_device(facts))
    check_device_num(device_num, device)
    call = call_of(facts, config, optimizer, device)
    plan, is_picked = _choose(call, dataloader, node_num, device)
    decision = decide(dataclasses.replace(call, plan=plan))

    mesh, guard, weights, statements = _meet(decision, device)
    shown = None if config.logging_steps is None else Preparation.make(facts.model, config, optimizer=optimizer)
    loader = None if dataloader is None else _make_loader(dataloader, mesh, device, decision)
    runtime = Runtime(mesh=mesh, guard=guard, plan=plan, plan_source=source_of_plan(config, is_picked=is_picked))
    if config.engine is not None:
        runtime.gradients.engine = Engine(config.engine)
    # A program that does not expect a pipeline may read evaluated logits.
    runtime.features.add(WholeLogits(in_training=config.gather_logits, in_evaluation=is_picked))
    build = Build.of(rehearsed(decision, mesh, device, [x.brought for x in statements]), runtime, device)
    distribute(build, optimizer, weights.make, seed=statements[0].seed)

    _warn_of_dtypes(facts, optimizer, plan)
    if shown is not None:
        start_monitor(facts.model, runtime, config, shown, every=config.logging_steps)
    _log(build)
    return optimizer, loader


def _look(facts: Facts, optimizer: Optimizer | None) -> Facts:
    """Return what a model shows, when its loading has ended and nothing else has distributed it."""
    if finish_loading(without_wrappers(facts.model)[1], optimizer):
        facts = Facts(facts.model)
    check_model(facts)
    if optimizer is not None:
        check_ownership(facts, optimizer)
    return facts


def _choose(
    call: Call, dataloader: Iterable[Any] | None, node_num: int | None, device: torch.device
) -> tuple[ParallelPlan, bool]:
    """Return the plan that is given, or saved in the model's config, or picked; and whether it is picked."""
    plan = given_plan(call.config) or plan_in_model(call.model, call.config)
    is_picked = plan is None
    if plan is None:
        _join(device, call.config)
        plan, reasons = pick_plan(runnable_plans(call), dataloader, node_num=node_num)
        tell_reasons(reasons)
    check_launch(plan)
    return plan, is_picked


def _meet(decision: Decision, device: torch.device) -> tuple[Mesh, Guard | None, InitialWeights, list[CallStatement]]:
    """Join the other ranks, compare with them what the call was given, and make equal what weights the model has.

    Returns:
        The mesh, the guard, the weights to begin with, and what all ranks have said.
    """
    facts, config = decision.facts, decision.config
    guard = _join(device, config)
    warn_of_unused_gpus(device, dist.get_rank() if dist.is_initialized() else 0)
    source = settled(config.weights)

    def find() -> InitialWeights:
        if (attention := flash_implementation(facts.names)) is not None:
            flash_function(attention)  # whose package may not load
        return InitialWeights.find(facts, source)

    weights, statements = meet(decision, find, device)
    mesh = Mesh.build(decision.plan.dims, device.type)
    if guard is not None:
        guard.set_coordinates(mesh.coordinates)
        set_timeouts(config.timeout_s)  # also for the groups just made
    if weights.equalise(facts, [statement.weights for statement in statements], device):
        logger.warning("the ranks built the model with different weights; all of them now use those of the first rank")
    return mesh, guard, weights, statements


def _log(build: Build) -> None:
    """Say on the first rank what was done."""
    if not (logger.isEnabledFor(logging.INFO) and is_first_rank()):
        return
    logger.info("distributed %s by %s\n%s", type(build.model).__name__, build.plan, build.plan.dims.rank_grid())
    if build.tensor_structure is not None:
        share = 100 * build.tensor_structure.cut_share
        logger.info("tp cuts %.0f %% of the weights; each rank of tp has the others whole", share)
    if build.mixers and build.plan.cp > 1:
        handing = sum(map(hands_states, build.mixers.values()))
        text = (
            "of the modules with recurrences or convolutions, each of the %d ranks of cp computes %d for its own "
            "tokens, and hands their states over, and %d for all tokens"
        )
        logger.info(text, build.plan.cp, handing, len(build.mixers) - handing)


def _join(device: torch.device, config: ToDistributedConfig) -> Guard | None:
    """Join the process group and start its guard, which watches all that follows."""
    start_process_group(device, config.timeout_s)
    return start_guard(timeout=config.timeout_s)


def _warn_of_dtypes(facts: Facts, optimizer: Optimizer | None, plan: ParallelPlan | None = None) -> None:
    """Warn on the first rank if an optimizer trains in float16, or a plan was estimated for another dtype."""
    if not is_first_rank():
        return
    parameters = facts.parameters
    dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
    if plan is not None and plan.dtype not in (None, dtype):
        logger.warning(
            "the plan was estimated for weights in %s, but the model has weights in %s, so its memory and time differ "
            "from the estimates. Load the model with dtype=torch.%s, or remove dtype from the plan",
            plan.dtype, dtype, plan.dtype,
        )  # fmt: skip
    trained = [name for name, p in parameters.items() if p.requires_grad and p.dtype == torch.float16]
    if trained and optimizer is not None:
        logger.warning(
            "the optimizer trains %d weights in float16 (the first is %s). Its smallest number is 6e-8, so the squares "
            "of gradients and Adam's eps=1e-8 round to 0, and the weights become NaN in the first steps, as on one "
            "device. Train in bfloat16: model.bfloat16(), or keep float32 weights under torch.autocast",
            len(trained), trained[0],
        )  # fmt: skip


def _complete(
    facts: Facts,
    runtime: Runtime,
    optimizer: Optimizer | None,
    dataloader: Iterable[Any] | None,
    config: ToDistributedConfig,
) -> tuple[Optimizer | None, DistributedLoader | None]:
    """Add an optimizer or a loader to a model that was distributed without one."""
    runtime.check_own("to_distributed", "pass the optimizer and the loader to its own initialize, with a new model")
    model = facts.model
    plan = plan_to_complete(runtime, model, optimizer, config)
    loss = runtime.features.find(BatchLoss)
    refuse(Call(facts=facts, plan=plan, config=config, loss=loss, optimizer=optimizer), REFUSALS_LATER)
    loader = None
    if dataloader is not None:
        format = runtime.features.get(BatchFormat)
        loader = _loader(dataloader, runtime.mesh, device_of(model), config, format)
        loader.feeds_causal_lm = isinstance(loss, CausalLMLoss)
    shows = config.logging_steps is not None and runtime.features.find(Watch) is None
    shown = Preparation.make(model, config, optimizer=optimizer) if shows else None
    complete(runtime, model, optimizer, plan, config)
    _warn_of_dtypes(facts, optimizer)
    if shown is not None:
        start_monitor(model, runtime, config, shown, every=config.logging_steps)
    return optimizer, loader


def _make_loader(dataloader: Iterable[Any], mesh: Mesh, device: torch.device, decision: Decision) -> DistributedLoader:
    format = BatchFormat.of(getattr(decision.decoder, "config", None), decision.config.batch_dims)
    loader = _loader(dataloader, mesh, device, decision.config, format)
    loader.feeds_causal_lm = decision.is_causal_lm
    return loader


def _loader(
    dataloader: Iterable[Any], mesh: Mesh, device: torch.device, config: ToDistributedConfig, format: BatchFormat
) -> DistributedLoader:
    loader_mesh = LoaderMesh.of(mesh, device)
    return made_together(lambda: DistributedLoader(dataloader, loader_mesh, options=config.loader, format=format))


def _starting_device(facts: Facts) -> torch.device:
    """Return the model's device; for a model without memory, CUDA if there is any."""
    if any(parameter.is_meta for parameter in facts.parameters.values()):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device_of(facts.model)


_WRITE = "write model, optimizer, loader = to_distributed(model, optimizer, loader)"


class ReturnedTuple(tuple[Any, Any, Any]):
    """The model, the optimizer and the loader."""

    __slots__ = ()

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"this is the tuple that to_distributed returned, not the model; {_WRITE}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the tuple that to_distributed returned has no attribute {name!r}; {_WRITE}")
