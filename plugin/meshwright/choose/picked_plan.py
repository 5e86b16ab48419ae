"""Picks the plan for ``to_distributed`` on this run's hardware profile: the plan that ``meshwright plan`` would show
first, if the model can run it.

Pipeline stages may be picked only for some models. What shows without a forward pass is decided before the search. If
the first choice has stages, the model's forward runs once on tensors without values. If its layers cannot be cut, a
search without stages follows.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from meshwright.choose.given_plan import with_sequence_parallel
from meshwright.choose.model_sizes import against_tensor, describe_model, kind_of, logits_in_training
from meshwright.context.check_method import check_method
from meshwright.context.record import check_token_wise, record_context
from meshwright.data.nested import leaves
from meshwright.errors import OptimizerMismatchError, PlanError
from meshwright.facts import Facts
from meshwright.faults.together import on_first_rank
from meshwright.mesh.host import available_memory
from meshwright.mesh.process_group import node_count, world_size
from meshwright.mesh.rank_grid import AXES
from meshwright.optim.elementwise import check_reads, declared
from meshwright.optim.runtime import find_runtime
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.parallel.fake_passes.routed_shape import on_meta
from meshwright.parallel.forward.recompute import can_recompute_some, check_recompute
from meshwright.parallel.losses.head_losses import find_loss
from meshwright.parallel.tensor_parallel.structure import describe as describe_structure
from meshwright.parallel.tensor_parallel.structure import outline
from meshwright.pipeline.layer_order import record_order
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.planner.answers import explain
from meshwright.planner.formatting import memory as memory_text
from meshwright.planner.formatting import seconds
from meshwright.planner.job.candidate import Candidate, Job
from meshwright.planner.job.optimizers import OptimizerKind
from meshwright.planner.machine.devices import Device, device_of_driver
from meshwright.planner.machine.hardware import CATALOGUE, Cluster, HardwareProfile
from meshwright.planner.search.search import TIE, TIED, Choice, Search, search
from meshwright.planner.search.space import Space
from meshwright.progress import is_first_rank
from meshwright.roles import Decoder, plan_for
from meshwright.roles.adapters import check_methods, without_wrappers
from meshwright.roles.blocks.experts import check_adapted_experts

PROFILE_FILE = "machine.json"  # the file that messages propose for a profile


def calibrate_command(*, processes: int, nodes: int = 1, path: str | os.PathLike[str] = PROFILE_FILE) -> str:
    """Return the command that measures a machine for a run.

    Args:
        processes: number of processes per node.
        nodes: number of nodes.
        path: file of the profile.

    Example:
        >>> calibrate_command(processes=4)
        'meshwright calibrate --processes 4 --output machine.json'
    """
    if nodes > 1:
        launched = f"torchrun --nnodes {nodes} --nproc-per-node {processes} ... -m meshwright.cli calibrate"
    else:
        launched = f"meshwright calibrate --processes {processes}"
    return f"{launched} --output {os.fspath(path)}"


def load_run_profile(path: str | os.PathLike[str], *, processes: int, nodes: int = 1) -> HardwareProfile:
    """Read a profile, and check that it is valid for a run.

    Args:
        path: file of the profile.
        processes: number of the run's processes per node.
        nodes: number of its nodes.

    Raises:
        PlanError: if the file holds no profile, or the profile was measured with other processes.
    """
    command = calibrate_command(processes=processes, nodes=nodes, path=path)
    profile = HardwareProfile.load(path, command=command)
    if profile.device is None:
        return profile
    reason = profile.against_processes(processes)
    if reason is None and nodes > 1 and profile.nodes == 1:
        reason = f"profile {profile.name!r} measured one node, but this run has {nodes} nodes"
    if reason is not None:
        raise PlanError(f"{path}: {reason}. Measure with {command}")
    return profile


logger = logging.getLogger(__name__)

_ROWS_TO_MEASURE = 8  # samples from which the length of a row is measured
_TOLERANCE = 0.1  # share of a model's parameters by which the planner's count may be off without a warning
_EXPLAINED = {*AXES, "zero", "micro_batch"} - {"cp"}  # the log says why other values of these were not chosen


def tell_reasons(reasons: str) -> None:
    """Log the reasons for a picked plan on rank 0, if there are any."""
    if reasons and is_first_rank():
        logger.warning("%s", reasons)  # INFO is hidden by default


def pick_plan(
    model: nn.Module,
    optimizer: Optimizer | None,
    dataloader: Iterable[object] | None,
    config: ToDistributedConfig,
    *,
    node_num: int | None,
    device: torch.device,
) -> tuple[ParallelPlan, str]:
    """Return the plan that the planner picks on rank 0, and its reasons; every rank gets the same plan.

    Args:
        model: a model with a transformers config, or with a decoder's structure.
        optimizer: the optimizer, whose state is counted, and which decides whether it may be sharded.
        dataloader: the loader that gives the batch size and row length, unless ``config.input_spec`` gives them.
        config: the options; ``memory_budget``, ``prefer``, ``hardware_profile`` and ``input_spec`` matter most.
        node_num: number of nodes; None for the launched number.
        device: the device of this process.

    Raises:
        PlanError: on every rank, if the planner cannot describe the model, the size of a batch is unknown, or no plan
            fits.
    """

    def pick() -> dict[str, Any]:
        rows, length = _batch(dataloader, config)
        nodes, reason = node_num or node_count(), against_stages(model, config)
        kind = kind_of(optimizer, model)
        found = _search(model, kind, rows, length, nodes, config, device, no_stages=reason)
        choice = _first_runnable(found, model, optimizer, config)
        if choice.plan.pp > 1 and (reason := why_not_cut(model, config)) is not None:
            found = _search(model, kind, rows, length, nodes, config, device, no_stages=reason)
            choice = _first_runnable(found, model, optimizer, config)
        reasons = "\n".join(_shown(found, choice, type(model).__name__))
        return {"plan": choice.plan.runnable_fields(), "reasons": reasons}

    picked = on_first_rank(pick)
    return with_sequence_parallel(ParallelPlan(**picked["plan"]), config), picked["reasons"]


def against_stages(model: nn.Module, config: ToDistributedConfig) -> str | None:
    """Return why no plan with pipeline stages may be picked for a model, as far as this shows without a forward pass.

    Args:
        model: the model.
        config: the options of ``to_distributed``.

    Returns:
        The reason; None if such a plan may be picked.
    """
    if not config.picks_stages:
        return "ToDistributedConfig(picks_stages=False)"
    if config.engine is not None:
        return f"{config.engine} runs the backward pass of the whole model"
    if find_loss(without_wrappers(model)[1], config.loss_averages_over) is None:
        return "the model computes its own loss, and a pipeline's backward pass runs inside the model's forward"
    if next(model.parameters()).dtype is torch.float16:
        return "stages were compared with one device in float16 under autocast only, not with float16 weights"
    return None


def why_not_cut(model: nn.Module, config: ToDistributedConfig) -> str | None:
    """Return why the layers of a model cannot be cut into stages; None if they can.

    The model's forward runs once on tensors without values.
    """
    decoder = without_wrappers(model)[1]
    try:
        order = record_order(outline(decoder, config.sharding_plan, instead="ParallelPlan(pp=1)"))
    except PlanError as error:
        return str(error)
    if not order.is_plain:
        return "what crosses its stages beside hidden states of [rows, tokens, channels] has no estimate"
    return None


def _search(
    model: nn.Module,
    kind: str | OptimizerKind,
    rows: int,
    length: int,
    nodes: int,
    config: ToDistributedConfig,
    device: torch.device,
    *,
    no_stages: str | None,
) -> Search:
    shape = describe_model(model, config)
    path, per_node = config.hardware_profile, max(1, world_size() // nodes)
    profile = None if path is None else load_run_profile(path, processes=per_node, nodes=nodes)
    cluster = cluster_at_hand(device, nodes, profile)
    job = Job(
        seq_len=length, global_batch=rows, on_cpu=device.type == "cpu",
        expert_load=config.expert_load, prefers_masters=True, logits=logits_in_training(model, config),
        optimizer=kind,
    )  # fmt: skip
    if next(model.parameters()).element_size() == 4:
        job = job.in_32_bits(may_autocast=True)
    budget = config.memory_budget
    if budget is not None and budget <= 1:
        budget *= cluster.device.memory
    parameters = sum(p.numel() for p in model.parameters())
    if abs(shape.parameters - parameters) > _TOLERANCE * parameters:
        logger.warning(
            "the planner expects %s to have %.1f M parameters, but it has %.1f M. Time and memory estimates may be off "
            "by the same factor. To choose the plan yourself, pass ToDistributedConfig(plan=ParallelPlan(...))",
            type(model).__name__, shape.parameters / 1e6, parameters / 1e6,
        )  # fmt: skip
    no_context = None if config.engine is None else f"{config.engine} averages gradients over dp alone"
    space = Space(shape=shape, cluster=cluster, job=job, most_zero=2, no_stages=no_stages, no_context=no_context,
                  no_tensor=against_tensor(model, config.sharding_plan), no_sharing=_against_sharing(config),
                  recomputes_some=can_recompute_some(without_wrappers(model)[1]))  # fmt: skip
    found = search(space, profile, top=TIED, budget=budget, within=TIE)
    if config.prefer == "memory" and found.choices:
        # Nothing fits into one byte, so each plan is tried with the most recompute.
        leanest = search(space, profile, budget=1).smallest[1].total
        found = search(space, profile, top=TIED, budget=leanest, within=TIE)
    if not found.choices:
        # ZeRO stage 3 comes last: its time was never measured, though its memory is as well known as the others'.
        found = search(dataclasses.replace(space, most_zero=3), profile, top=TIED, budget=budget, within=TIE)
    if not found.choices:
        raise explain.no_fit(found)
    return found


def _against_sharing(config: ToDistributedConfig) -> str | None:
    """Return why no plan in which ranks share experts may be picked; None if one may."""
    if config.engine is not None:
        return f"experts that ranks share were not compared with one device under {config.engine}"
    return None if config.compile is None else "the host would read how many tokens travel inside of compiled layers"


def _first_runnable(
    found: Search, model: nn.Module, optimizer: Optimizer | None, config: ToDistributedConfig
) -> Choice:
    """Return the first plan that the model and the optimizer can run."""
    refusals: dict[str, str] = {}
    for choice in found.choices:
        refusal = next(_refusals(choice.plan, model, optimizer, config), None)
        if refusal is None:
            return choice
        refusals[choice.plan.label] = refusal
    reasons = "; ".join(f"{label}: {reason}" for label, reason in list(refusals.items())[:3])
    raise PlanError(f"none of the plans that fit works for {type(model).__name__}: {reasons}")


def _refusals(
    plan: Candidate, model: nn.Module, optimizer: Optimizer | None, config: ToDistributedConfig
) -> Iterator[str]:
    decoder = without_wrappers(model)[1]
    if plan.gradient_accumulation_steps > 1 and find_loss(decoder, config.loss_averages_over) is None:
        yield "the model computes its own loss, so a batch cannot be split into micro-batches"
    try:
        runnable = ParallelPlan(**plan.runnable_fields())
        check_methods(model, runnable.cut_axes, has_micro_batches=runnable.has_micro_batches)
        check_adapted_experts(Facts(decoder), ep=plan.ep, etp=1, zero_stage=plan.zero_stage)
        if plan.recompute == "full":
            check_recompute(decoder, plan.recomputed_layers)
        if optimizer is not None:
            check_reads(optimizer, reads=declared(config), plan=runnable)
        structure: Decoder | None = None
        if plan.tp > 1:
            sharding = config.sharding_plan or plan_for(decoder)
            structure = describe_structure(decoder, sharding, tp=plan.tp, sequence_parallel=plan.sequence_parallel)
        if plan.cp > 1:
            structure = structure or outline(decoder, config.sharding_plan, instead="ParallelPlan(cp=1)")
            check_token_wise(structure, config.sharding_plan)
            check_method(record_context(structure), runnable)
    except (PlanError, OptimizerMismatchError) as error:
        yield str(error)


def _batch(dataloader: Iterable[object] | None, config: ToDistributedConfig) -> tuple[int, int]:
    """Return the rows of the global batch, and the tokens per row."""
    if config.input_spec is not None:
        shapes = [tuple(spec[0]) for spec in config.input_spec.values()]
        for shape in shapes:
            if len(shape) == 2:
                return shape
        raise PlanError(f"ToDistributedConfig.input_spec has no entry of shape (rows, tokens), only {shapes}")
    if isinstance(dataloader, DataLoader) and _is_mapped(dataloader.dataset):
        rows = dataloader.batch_size or getattr(dataloader.batch_sampler, "batch_size", None)
        if rows and len(dataloader.dataset):  # type: ignore[arg-type]
            return rows, _length(dataloader)
    raise PlanError(
        "picking a plan needs the size of a batch, which this dataloader does not show; write "
        'ToDistributedConfig(input_spec={"input_ids": ((8, 2048), torch.int64)}), or pass a plan'
    )


def _is_mapped(dataset: object) -> bool:
    """Return whether a dataset is map-style, so that reading a row does not consume it."""
    return not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _length(dataloader: DataLoader[object]) -> int:
    """Return the tokens per row of a batch of the first rows."""
    state, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):  # only rank 0 reads, so its random state must not change
        count = min(_ROWS_TO_MEASURE, len(dataloader.dataset))  # type: ignore[arg-type]
        batch = dataloader.collate_fn([dataloader.dataset[index] for index in range(count)])
    random.setstate(state)
    np.random.set_state(of_numpy)
    schema = BatchSchema(dict(leaves(batch)))
    for tensor in [*([schema.tokens] if schema.has_tokens else []), *schema.tensors.values()]:
        if tensor.ndim == 2:
            return tensor.shape[1]
    raise PlanError(
        "picking a plan needs the length of a row, but the dataloader's batches have no tensor of shape (rows, "
        'tokens); write ToDistributedConfig(input_spec={"input_ids": ((8, 2048), torch.int64)})'
    )


def cluster_at_hand(device: torch.device, nodes: int, profile: HardwareProfile | None) -> Cluster:
    """Return the launched devices as a cluster, with their actual memory."""
    world = world_size()
    per_node = max(1, world // nodes)
    properties = None if device.type == "cpu" else torch.cuda.get_device_properties(device)
    memory = available_memory() / per_node if properties is None else properties.total_memory
    if profile is not None and profile.device is not None:
        cluster = profile.cluster(gpus=world, gpus_per_node=per_node)
    else:
        known = CATALOGUE["cpu"] if properties is None else _known(properties.name, memory)
        cluster = Cluster(device=known, gpus=world, gpus_per_node=per_node)
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory=memory))


@functools.cache
def _known(name: str, memory: float) -> Device:
    """Return a GPU's figures in the catalogue; for an unlisted GPU the A100's, since its ratios are typical."""
    if (found := device_of_driver(name, memory)) is not None:
        return found
    typical = CATALOGUE["a100-40" if memory < 48 * 2**30 else "a100-80"]
    if is_first_rank():
        logger.warning(
            "the planner's catalogue has no %s, so plans and times are estimated with the speeds of %s, and its own "
            "memory. Estimates of time may be far off. To measure this machine, run meshwright calibrate --output "
            "profile.json and set ToDistributedConfig(hardware_profile='profile.json')",
            name,
            typical.name,
        )
    return typical


def _shown(found: Search, choice: Choice, name: str) -> list[str]:
    """Return the lines to log: on one device only what memory has decided, since there are no sizes to choose."""
    plan, lines = choice.plan, _lines(found, choice, name)
    if found.cluster.gpus > 1:
        return lines
    return [] if plan.gradient_accumulation_steps == 1 and plan.recompute == "none" else lines[:2]


def _lines(found: Search, choice: Choice, name: str) -> list[str]:
    """Return the lines with the picked plan, its estimates, and the reasons against others."""
    job, cluster = found.job, found.cluster
    following = ""
    for other in found.choices[found.choices.index(choice) + 1 :][:1]:
        percent, why = round(100 * (other.time.total / choice.time.total - 1)), ""
        if percent < 0:  # what comes first is not always the fastest
            rounds_more = job.rounds_updates(other.plan) > job.rounds_updates(choice.plan)
            why = " (no 32-bit masters)" if rounds_more else " (a tie, and less simple)"
        following = f"next {other.plan.label}, {percent:+d}% time{why}; "
    against = "; ".join(
        f"{value} {reason}" for value, reason in explain.reasons(found) if value.partition("=")[0] in _EXPLAINED
    )
    return [
        f"picked {choice.plan.label} for {name} ({found.shape.parameters / 1e6:,.1f} M parameters), "
        f"{job.global_batch} x {job.seq_len} tokens per step on {cluster.gpus} x {cluster.device.name}",
        f"  estimated {seconds(choice.time.total)} per step (±{found.profile.band:.0%}), "
        f"{memory_text(choice.memory.total)} of {memory_text(found.budget)} per device; {found.fitting} of "
        f"{found.weighed} plans fit",
        f"  {following}{against or 'nothing was ruled out'}. To choose: ToDistributedConfig(plan=ParallelPlan(...))",
    ]


def plan_card(
    model: nn.Module,
    dataloader: Iterable[object],
    *,
    rows: int,
    device: torch.device,
    optimizer: Optimizer | None = None,
) -> str:
    """Return a text with the plan that the planner would pick for the launched devices and its estimates.

    The call does not communicate.

    Args:
        model: a model with a transformers config.
        dataloader: the loader, whose rows give the length of a row.
        rows: rows of the global batch of one optimizer step.
        device: the device of this process.
        optimizer: the optimizer, whose state is counted; that of AdamW without one.

    Raises:
        PlanError: if the planner cannot describe the model, the length of a row is unknown, or no plan fits.
    """
    if not _is_mapped(getattr(dataloader, "dataset", None)):
        raise PlanError("the dataset is a stream, which does not show the length of a row")
    config, length = ToDistributedConfig(), _length(dataloader)  # type: ignore[arg-type]
    kind = kind_of(optimizer, model)
    if find_runtime(model) is not None:  # its forward is that of its plan, with the collectives of all ranks
        model = on_meta(without_wrappers(model)[1])
    found = _search(model, kind, rows, length, 1, config, device, no_stages=against_stages(model, config))
    choice = found.choices[0]
    speed = choice.tokens_per_second * found.cluster.gpus
    return "\n".join([*_lines(found, choice, type(model).__name__)[:2], f"  expected: {speed:,.0f} tokens/s in all"])


def device_at_hand(device: torch.device) -> Device:
    """Return the catalogue's figures for this process's device, or for the nearest one in the catalogue."""
    return cluster_at_hand(device, 1, None).device
