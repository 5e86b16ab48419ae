"""Checks a plan against the launched processes, and makes the process groups of its axes."""

from __future__ import annotations

import contextlib
import dataclasses
import os

import torch.distributed as dist

from meshwright.errors import PlanError
from meshwright.faults.together import texts_of_all
from meshwright.mesh.local_device import check_is_alone
from meshwright.mesh.process_group import node_count, world_size
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.plan.foreign_names import NO_SCALER

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
    for what, said in zip(("plans", "options"), zip(*ranks, strict=True), strict=True):
        for rank, other in enumerate(said):
            if other != said[0]:
                raise PlanError(
                    f"the ranks were given different {what}; rank 0: {said[0]}, rank {rank}: {other}. Every process "
                    "must make the same call"
                )
