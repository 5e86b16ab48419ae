"""``to_distributed``: a one-device program's model, optimizer and loader, made distributed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from meshwright.arguments import check_arguments, check_model, explained
from meshwright.automatic import choose_plan
from meshwright.checkpoint.pretrained import export_with_full_weights
from meshwright.completion import complete, plan_to_complete
from meshwright.config import ParallelPlan, PlanLike, ToDistributedConfig
from meshwright.construct.weights import InitialWeights, NewTensors
from meshwright.copying import make_copyable
from meshwright.data.loader import DistributedLoader, made_together
from meshwright.data.peers import Peers
from meshwright.errors import PlanError
from meshwright.faults.digest import memory_digest
from meshwright.faults.guard import start_guard
from meshwright.given import config_with, given_plan, plan_in_model
from meshwright.launch import build_axes, check_agreement, check_devices, check_launch, device_for, start_process_group
from meshwright.optim.elementwise import check_elementwise
from meshwright.optim.rebind import check_ownership, shard_state
from meshwright.optim.runtime import Runtime, attach, device_of, find_runtime
from meshwright.optim.shard import install_gradient_sync, leave_gradients_to_engine
from meshwright.optim.state_dicts import guard_model
from meshwright.optim.units import ShardedWeights
from meshwright.optim.watch import watch_steps
from meshwright.parallel.collectives import Axis, agree, all_gather
from meshwright.parallel.comparison import ReplicaComparison
from meshwright.parallel.dropout import DropoutStreams, dropout_seed
from meshwright.parallel.forward import ForwardState
from meshwright.parallel.guarded import refuse_wrapping
from meshwright.parallel.head_losses import LossKind, find_loss, install_loss
from meshwright.parallel.hooked import HookedModules
from meshwright.parallel.loss import CausalLMLoss
from meshwright.parallel.mean import GlobalMean
from meshwright.parallel.microbatch import SplitForward
from meshwright.parallel.outcome import succeed_together, take_from_first
from meshwright.parallel.packed_rows import keep_documents_apart
from meshwright.parallel.recompute import recompute_switch
from meshwright.parallel.sampling import sample_together
from meshwright.parallel.structure import DecoderStructure, describe
from meshwright.parallel.tensor import guard_shards, install_tensor_parallel, shard_shape, share_partial_gradients
from meshwright.parallel.uneven import UnevenBatches
from meshwright.plans import plan_for
from meshwright.plans.adapters import refuse_merging, refuse_resizing, refuse_unloading, without_wrappers

logger = logging.getLogger(__name__)


def to_distributed(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    dataloader: Iterable[Any] | None = None,
    device_num: int | None = None,
    node_num: int | None = None,
    config: ToDistributedConfig | None = None,
    *,
    plan: PlanLike | None = None,
) -> tuple[Any, Any, Any]:
    """Turn a one-device program into a distributed one; its training loop stays as it is.

    Without a plan in the config it is the one in the model's own config, if any; else the planner picks
    the fastest that fits, and logs it. Every launched process calls it with the same arguments. The model
    and the optimizer stay the user's objects, changed in place. If the call raises, nothing was changed.

    A model that was distributed alone, by this call or as it was loaded, may be passed again with an
    optimizer over its parameters and with loaders; the plan is then the model's.

    Args:
        model: a causal LM of transformers (or of the same shape): whole, on this process's device; or
            without memory, built under ``deferred_init`` or on the meta device, of which each rank then
            makes its shard only (on CUDA where there is any).
        optimizer: over the model's parameters; its groups and its state are kept.
        dataloader: yields global batches, of the size that one device would train on.
        device_num: devices a node; None: what was launched.
        node_num: nodes; None: what was launched.
        config: the options, and the plan where ``plan`` does not say it.
        plan: how a step is spread over devices: a ParallelPlan, its words as the planner prints them ("dp2 tp2+sp
            zero1"), a dict of its fields, the path of a plan file, or "auto" to have the planner pick.

    Returns:
        The model, the optimizer and a loader of this rank's rows. What was None stays None.

    Raises:
        PlanError: for a plan that the model, the launch or this version cannot run, or where none fits.
        AlreadyDistributedError: for a model that DDP, FSDP, DeepSpeed or an earlier call distributed.
        OptimizerMismatchError: for an optimizer of another model, or one that is wrong on shards.
        CheckpointError: for ``config.weights`` that are unsound or not this model's.
        UninitialisedParameterError: for a model on the meta device that nothing initialises.

    Example::

        model, optimizer, loader = mw.to_distributed(model, optimizer, loader, plan="dp2 tp2+sp zero1")
    """
    config = config_with(config, plan)
    check_arguments(model, optimizer, dataloader)
    runtime = find_runtime(model)
    if runtime is not None and (optimizer is not None or dataloader is not None):
        check_devices(device_num, node_num)
        return _complete(model, runtime, optimizer, dataloader, config)
    check_model(model)
    if optimizer is not None:
        check_ownership(model, optimizer)
    _, decoder = without_wrappers(model)
    kind = find_loss(decoder, config.loss_averages_over)
    device = device_for(_starting_device(model))
    check_devices(device_num, node_num)
    plan = given_plan(config) or plan_in_model(model, config)
    if plan is None:
        start_process_group(device, config.timeout_s)
        plan = choose_plan(
            model, optimizer, dataloader, node_num, config, device,
            splits_batches=kind is not None, recomputes=recompute_switch(decoder) is not None,
        )  # fmt: skip
    check_launch(plan)
    if optimizer is not None and (plan.tp > 1 or plan.zero_stage > 0):
        check_elementwise(optimizer, is_trusted=config.optimizer_is_elementwise)
    structure = None
    if plan.tp > 1:
        structure = _structure_for(decoder, plan, config)
    _check_micro_batches(plan, kind is not None, decoder)

    start_process_group(device, config.timeout_s)
    check_agreement(plan)
    tp, dp = build_axes(plan, device)
    guard = start_guard(timeout=config.timeout_s, coordinates=f"dp={dp.rank} tp={tp.rank}")
    weights = succeed_together(lambda: InitialWeights.find(model, config.weights))
    _equalise_weights(model, weights, tp, dp, device)

    loader = None if dataloader is None else _make_loader(dataloader, tp, dp, device, config)
    if loader is not None:
        loader.feeds_causal_lm = kind is not None and kind.is_causal_lm
    runtime = Runtime(tp=tp, dp=dp, parameters=[], guard=guard, plan=plan, engine=config.engine)
    _shard_model(model, optimizer, structure, plan, config, runtime, weights, device, kind)
    if logger.isEnabledFor(logging.INFO) and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.info("distributed %s by %s\n%s", type(model).__name__, plan, plan.dims.rank_grid())
    return model, optimizer, loader


def _complete(
    model: Any,
    runtime: Runtime,
    optimizer: Optimizer | None,
    dataloader: Iterable[Any] | None,
    config: ToDistributedConfig,
) -> tuple[Any, Any, Any]:
    """Add an optimizer or a loader to a model that was distributed without."""
    runtime.check_own("to_distributed", "pass the optimizer and the loader to its own initialize, with a new model")
    plan = plan_to_complete(runtime, model, optimizer, config)
    _check_micro_batches(plan, runtime.loss is not None, model)
    loader = None
    if dataloader is not None:
        loader = _make_loader(dataloader, runtime.tp, runtime.dp, device_of(model), config)
        loader.feeds_causal_lm = isinstance(runtime.loss, CausalLMLoss)
    complete(runtime, model, optimizer, plan, bucket_bytes=int(config.bucket_size_mb * 2**20))
    return model, optimizer, loader


def _make_loader(
    dataloader: Iterable[Any], tp: Axis, dp: Axis, device: torch.device, config: ToDistributedConfig
) -> DistributedLoader:
    return made_together(
        lambda: DistributedLoader(dataloader, dp=dp, peers=Peers((tp,)), device=device, options=config.loader)
    )


def _structure_for(model: nn.Module, plan: ParallelPlan, config: ToDistributedConfig) -> DecoderStructure:
    try:
        sharding_plan = config.sharding_plan or plan_for(model)
        return describe(model, sharding_plan, tp=plan.tp, sequence_parallel=plan.sequence_parallel)
    except PlanError as error:
        if (shown := explained(error, model)) is error:
            raise
        raise shown from error


def _check_micro_batches(plan: ParallelPlan, has_known_loss: bool, model: nn.Module) -> None:
    if plan.has_micro_batches and not has_known_loss:
        raise PlanError(
            f"the plan splits the batch into micro-batches, and what the loss of {type(model).__name__} averages over "
            "is not known, so that those of the micro-batches cannot be put together. Set "
            "ToDistributedConfig(loss_averages_over='rows'), 'labels' or a callable that counts in a batch; or "
            "gradient_accumulation_steps=1 and micro_batch_size=None"
        )
    if plan.recompute == "full" and recompute_switch(model) is None:
        raise PlanError(f"ParallelPlan.recompute='full': {type(model).__name__} has no gradient_checkpointing_enable")


def _starting_device(model: nn.Module) -> torch.device:
    """Where the model is; for one without memory, CUDA where there is any."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device_of(model)


def _equalise_weights(model: nn.Module, weights: InitialWeights, tp: Axis, dp: Axis, device: torch.device) -> None:
    """Give every rank the first rank's weights where they differ, e.g. for want of a seed."""
    if tp.size * dp.size == 1:
        return
    differ = weights.equalise_draws(device)
    if tensors := [t.detach() for t in weights.own_tensors(model)]:
        digest = torch.stack([memory_digest(t) for t in tensors]).to(device)
        ranks = all_gather(all_gather(digest[None], tp), dp)
        if not torch.equal(ranks, ranks[:1].expand_as(ranks)):
            differ = True
            for tensor in tensors:
                take_from_first(tensor, device)
    if differ:
        logger.warning("the ranks built the model with different weights; all of them now use those of the first rank")


def _shard_model(
    model: Any,
    optimizer: Optimizer | None,
    structure: DecoderStructure | None,
    plan: ParallelPlan,
    config: ToDistributedConfig,
    runtime: Runtime,
    weights: InitialWeights,
    device: torch.device,
    loss: LossKind | None,
) -> None:
    prefix, decoder = without_wrappers(model)
    layouts = {prefix + name: layout for name, layout in structure.parameters.items()} if structure else {}
    made = succeed_together(lambda: make_weights(model, plan, layouts, runtime, weights.make, device))
    made.attach(model)
    model.to(device)
    agreed_seed = int(agree(torch.tensor([dropout_seed()], device=device), runtime.tp, runtime.dp))
    install(model, optimizer, structure, plan, config, runtime, agreed_seed, loss=loss)
    if runtime.engine is None:
        _guard_shards(model, decoder, structure, runtime)
    guard_model(model, runtime)
    # With adapters, the model is around the decoder, and a user may save either.
    for part in {id(x): x for x in (model, decoder)}.values():
        export_with_full_weights(part)
        attach(part, runtime)
        if runtime.engine is None:
            make_copyable(part, model, runtime)
    if structure is not None:
        refuse_unloading(model)
    if runtime.weights is not None:
        refuse_merging(model)
    refuse_wrapping(model)
    refuse_resizing(model)


def _guard_shards(model: nn.Module, decoder: nn.Module, structure: DecoderStructure | None, runtime: Runtime) -> None:
    if structure is not None:
        guard_shards(model, structure)
    if runtime.weights is not None:
        runtime.weights.guard()
    elif structure is not None:
        share_partial_gradients(model, decoder, structure)


def make_weights(
    model: nn.Module,
    plan: ParallelPlan,
    layouts: dict[str, Any],
    runtime: Runtime,
    make: Callable[..., NewTensors],
    device: torch.device,
) -> NewTensors:
    """What this rank is to hold of a model; under ZeRO stage 3 its part of each shard goes to ``runtime.weights``.

    Args:
        make: given the model, its layouts, the TP axis, the device and what to keep of each shard.
    """
    if plan.zero_stage < 3 or plan.dp == 1:
        return make(model, layouts, runtime.tp, device)
    sharded = ShardedWeights(model, lambda name, p: shard_shape(p, layouts.get(name)), runtime.dp, device)
    made = make(model, layouts, runtime.tp, device, sharded.keep)
    runtime.weights = sharded
    return made


def install(
    model: Any,
    optimizer: Optimizer | None,
    structure: DecoderStructure | None,
    plan: ParallelPlan,
    config: ToDistributedConfig,
    runtime: Runtime,
    seed: int,
    *,
    loss: LossKind | None,
) -> None:
    """Make a model whose parameters are shards already work as one of many; communicates nothing.

    Args:
        seed: of the dropout streams, the same on all ranks.
        loss: what is known of the model's loss.
    """
    tp, dp = runtime.tp, runtime.dp
    decoder: Any = without_wrappers(model)[1]
    if optimizer is not None:
        shard_state(optimizer)
    if runtime.weights is not None:
        runtime.weights.attach(model)
    streams = runtime.streams = DropoutStreams(tp=tp, dp=dp, seed=seed)
    if runtime.guard is not None:
        runtime.comparison = ReplicaComparison(
            model,
            tp=tp,
            dp=dp,
            guard=runtime.guard,
            every=_steps_between_comparisons(plan, config),
            has_weights=runtime.weights is None and runtime.engine is None,
        )
    is_causal_lm = loss is not None and loss.is_causal_lm
    runtime.uneven = UnevenBatches(dp, tp)
    runtime.hooked = HookedModules(
        decoder, structure, sequence_parallel=plan.sequence_parallel, is_split=plan.has_micro_batches
    )
    forward = ForwardState(
        decoder,
        streams,
        inner=_callable_alone(decoder, structure),
        tp=tp,
        dp=dp,
        guard=runtime.guard,
        comparison=runtime.comparison,
        has_sharded_loss=is_causal_lm and structure is not None and not config.gather_logits,
        has_known_loss=loss is not None,
        uneven=runtime.uneven,
        hooked=runtime.hooked,
        refuses_internals=structure is not None,
        shares_weights=runtime.weights is not None,
        follow=runtime.follow,
    )
    keep_documents_apart(decoder)
    if structure is not None:
        install_tensor_parallel(
            structure,
            tp,
            sequence_parallel=plan.sequence_parallel,
            streams=streams,
            keep_logits_sharded=forward.keep_logits_sharded,
        )
    if runtime.engine is not None:
        leave_gradients_to_engine(runtime, model)
    else:
        install_gradient_sync(
            runtime,
            model,
            optimizer,
            zero_stage=plan.zero_stage,
            bucket_bytes=int(config.bucket_size_mb * 2**20),
        )
        watch_steps(runtime, is_trusted=config.optimizer_is_elementwise)
    if loss is not None:
        mean = GlobalMean(dp, config.num_items_in_batch)
        runtime.loss = install_loss(decoder, loss, mean, tp=tp, vocab_size=structure.vocab_size if structure else 0)
        if plan.has_micro_batches:
            decoder.forward = SplitForward(
                decoder,
                count=plan.count_micro_batches,
                dp=dp,
                syncs=runtime.syncs,
                loss=runtime.loss,
                keeps_logits=config.gather_logits,
            )
    for part in {id(x): x for x in (model, decoder)}.values():
        sample_together(part, tp, runtime.guard)
    if plan.recompute == "full":
        recompute_switch(decoder)({"use_reentrant": False})


def _steps_between_comparisons(plan: ParallelPlan, config: ToDistributedConfig) -> int:
    if config.check_replicas_every is not None:
        return config.check_replicas_every
    # Under ZeRO's stages 1 and 2 the next step overwrites all copies of a weight by its owner's, a faulty one too.
    return 1 if plan.zero_stage in (1, 2) and plan.dp > 1 else 50


def _callable_alone(decoder: Any, structure: DecoderStructure | None) -> list[nn.Module]:
    """The modules in a model that programs call by themselves: transformers' base model, and what holds the layers."""
    inner = [getattr(decoder, "base_model", None), None if structure is None else structure.model]
    return [module for module in inner if isinstance(module, nn.Module)]
