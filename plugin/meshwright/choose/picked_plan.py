"""Picks the plan for ``to_distributed`` on this run's hardware profile: the plan that ``meshwright plan`` would show
first, if the model can run it.

The runtime says which plans it refuses (``Feature.refusals``), and decides, as for a given plan, what the first choice
does to the model, in passes without values. If no choice can run, a search without what was refused follows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from meshwright.choose.given_plan import with_sequence_parallel
from meshwright.choose.model_sizes import describe_model, kind_of, logits_in_training
from meshwright.choose.runnable_plans import RunnablePlans
from meshwright.data.nested import leaves
from meshwright.errors import PlanError
from meshwright.faults.together import on_first_rank
from meshwright.mesh.host import available_memory
from meshwright.mesh.process_group import node_count, world_size
from meshwright.mesh.rank_grid import AXES
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.progress import is_first_rank
from meshwright_plan.answers import explain
from meshwright_plan.formatting import memory as memory_text
from meshwright_plan.formatting import seconds
from meshwright_plan.job.candidate import Job
from meshwright_plan.job.optimizers import OptimizerKind
from meshwright_plan.machine.devices import Device, device_of_driver
from meshwright_plan.machine.hardware import CATALOGUE, Cluster, HardwareProfile
from meshwright_plan.search.search import TIE, TIED, Choice, Search, axes_of, search
from meshwright_plan.search.space import Space

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
        launched = f"torchrun --nnodes {nodes} --nproc-per-node {processes} ... -m meshwright_tools.cli calibrate"
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
_NAMED = 3  # reasons for which plans that fit are refused, of those that a message names
_EXPLAINED = {*AXES, "zero", "micro_batch"} - {"cp"}  # the log says why other values of these were not chosen


def tell_reasons(reasons: str) -> None:
    """Log the reasons for a picked plan on rank 0, if there are any."""
    if reasons and is_first_rank():
        logger.warning("%s", reasons)  # INFO is hidden by default


def pick_plan(
    plans: RunnablePlans, dataloader: Iterable[object] | None, *, node_num: int | None = None
) -> tuple[ParallelPlan, str]:
    """Return the plan that the planner picks on rank 0, and its reasons; every rank gets the same plan.

    Args:
        plans: the call, and the plans that the runtime takes for it. The model has a transformers config or a decoder's
            structure. Of the options, ``memory_budget``, ``prefer``, ``hardware_profile`` and ``input_spec`` matter
            most.
        dataloader: the loader that gives the batch size and row length, unless ``config.input_spec`` gives them.
        node_num: number of nodes; None for the launched number.

    Raises:
        PlanError: on every rank, if the planner cannot describe the model, the size of a batch is unknown, or no plan
            fits.
    """

    def pick() -> dict[str, Any]:
        rows, length = _batch(dataloader, plans.call.config)
        kind = kind_of(plans.call.optimizer, plans.call.model)
        space, profile = _space(plans, rows, length, node_num or node_count(), kind)
        found, choice = _first_runnable(plans, space, profile, cut=True)
        reasons = "\n".join(_shown(found, choice, type(plans.call.model).__name__))
        return {"plan": choice.plan.plan.changed, "reasons": reasons}

    picked = on_first_rank(pick)
    return with_sequence_parallel(ParallelPlan(**picked["plan"]), plans.call.config), picked["reasons"]


def _first_runnable(
    plans: RunnablePlans, space: Space, profile: HardwareProfile | None, *, cut: bool
) -> tuple[Search, Choice]:
    """Return the first plan that is not refused, when it cuts the model or before; and the search that found it.

    If an axis of a refused plan is to blame, a search without it follows, and otherwise the next plan.
    """
    refusal = plans.refusal_when_cut if cut else plans.refusal
    while True:
        found = _search(plans, space, profile)
        for choice in found.choices:
            if (reason := refusal(choice.plan)) is None:
                return found, choice
            found.space.refused.setdefault(choice.plan.label, reason)
            sizes = {axis: getattr(choice.plan, axis) for axis in axes_of(choice.plan)}
            reasons = {f"{axis}={n}": plans.blames(axis, n, cut=cut) for axis, n in sizes.items()}
            if blamed := {size: reason for size, reason in reasons.items() if reason is not None}:
                space = dataclasses.replace(space, against={**space.against, **blamed})
                break


def _space(
    plans: RunnablePlans, rows: int, length: int, nodes: int, kind: str | OptimizerKind
) -> tuple[Space, HardwareProfile | None]:
    """Return the plans to search, and the profile of the machine if one is given."""
    model, config, device = plans.call.model, plans.call.config, plans.call.device
    shape = describe_model(model, config)
    assert device is not None
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
    parameters = sum(p.numel() for p in model.parameters())
    if abs(shape.parameters - parameters) > _TOLERANCE * parameters:
        logger.warning(
            "the planner expects %s to have %.1f M parameters, but it has %.1f M. Time and memory estimates may be off "
            "by the same factor. To choose the plan yourself, pass ToDistributedConfig(plan=ParallelPlan(...))",
            type(model).__name__, shape.parameters / 1e6, parameters / 1e6,
        )  # fmt: skip
    against, refuses = plans.against(), plans.known_refusal
    return Space(shape=shape, cluster=cluster, job=job, most_zero=2, against=against, refuses=refuses), profile


def _search(plans: RunnablePlans, known: Space, profile: HardwareProfile | None) -> Search:
    """Return the search for the fastest plans that fit and are not known to be refused.

    Raises:
        PlanError: if there is none.
    """
    config, budget = plans.call.config, plans.call.config.memory_budget
    if budget is not None and budget <= 1:
        budget *= known.cluster.device.memory
    asked = dataclasses.replace(known, refuses=plans.refusal)
    find = functools.partial(search, profile=profile, top=TIED, within=TIE)
    found = find(known, budget=budget)
    if config.prefer == "memory" and found.choices:
        # Nothing fits into one byte, so each plan is tried with the most recompute.
        found = find(known, budget=search(asked, profile, budget=1).smallest[1].total)
    if not found.choices:
        # ZeRO stage 3 comes last: its time was never measured, though its memory is as well known as the others'.
        found = find(dataclasses.replace(known, most_zero=3), budget=budget)
    if found.choices:
        return found
    if found.fitting:
        refused = _refused(found)
        if len(refused) == 1:
            raise PlanError(next(iter(refused)))
        said = "; ".join(f"{label}: {reason}" for reason, label in itertools.islice(refused.items(), _NAMED))
        raise PlanError(f"none of the plans that fit works for {type(plans.call.model).__name__}: {said}")
    raise explain.no_fit(find(dataclasses.replace(asked, most_zero=3), budget=budget))


def _refused(found: Search) -> dict[str, str]:
    """Return each reason why the runtime refuses plans that fit, and the first such plan."""
    first: dict[str, str] = {}
    for label, reason in found.space.refused.items():
        first.setdefault(reason, label)
    return first


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
    refused = "; ".join(f"{label}: {reason}" for reason, label in itertools.islice(_refused(found).items(), _NAMED))
    return [
        f"picked {choice.plan.label} for {name} ({found.shape.parameters / 1e6:,.1f} M parameters), "
        f"{job.global_batch} x {job.seq_len} tokens per step on {cluster.gpus} x {cluster.device.name}",
        f"  estimated {seconds(choice.time.total)} per step (±{found.profile.band:.0%}), "
        f"{memory_text(choice.memory.total)} of {memory_text(found.budget)} per device; {found.fitting} of "
        f"{found.weighed} plans fit",
        f"  {following}{against or 'nothing was ruled out'}. To choose: ToDistributedConfig(plan=ParallelPlan(...))",
        *([f"  refused: {refused}"] if refused else []),
    ]


def plan_card(plans: RunnablePlans, dataloader: Iterable[object], *, rows: int, optimizer: str | OptimizerKind) -> str:
    """Return a text with the plan that the planner would pick for the launched devices and its estimates.

    The call does not communicate.

    Args:
        plans: the call, with a model that has a transformers config, and the plans that the runtime takes for it.
        dataloader: the loader, whose rows give the length of a row.
        rows: rows of the global batch of one optimizer step.
        optimizer: what the optimizer keeps, as ``kind_of`` finds it.

    Raises:
        PlanError: if the planner cannot describe the model, the length of a row is unknown, or no plan fits.
    """
    if not _is_mapped(getattr(dataloader, "dataset", None)):
        raise PlanError("the dataset is a stream, which does not show the length of a row")
    length = _length(dataloader)  # type: ignore[arg-type]
    found, choice = _first_runnable(plans, *_space(plans, rows, length, 1, optimizer), cut=False)
    speed = choice.tokens_per_second * found.cluster.gpus
    lines = _lines(found, choice, type(plans.call.decoder).__name__)[:2]
    return "\n".join([*lines, f"  expected: {speed:,.0f} tokens/s in all"])


def device_at_hand(device: torch.device) -> Device:
    """Return the catalogue's figures for this process's device, or for the nearest one in the catalogue."""
    return cluster_at_hand(device, 1, None).device
