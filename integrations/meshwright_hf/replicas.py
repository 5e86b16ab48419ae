"""Checks whether ranks that must hold equal weights still do."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import DivergenceError
from meshwright.faults.memory_digest import memory_digest
from meshwright.optim.runtime import Runtime, find_runtime
from meshwright.parallel.row_layout import is_held, record_of

logger = logging.getLogger(__name__)


def check_replicas(model: nn.Module, *, step: int) -> None:
    """Raise if a weight differs between ranks that must hold it equally, by digests; every rank makes the call.

    Without a plan, as under DDP, all ranks hold the same weights. In a distributed model the ranks of the dp axis do,
    and for weights that are not sharded also the ranks of the tp axis. A model whose weights are sharded over dp (FSDP,
    DeepSpeed stage 3, ZeRO stage 3) is not checked. In a pipeline, the ranks of a parameter's stage are compared.

    Raises:
        DivergenceError: on every rank, if weights differ; the message names the first weight that differs and the
            ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    runtime = find_runtime(model)
    parameters = dict(model.named_parameters())
    is_fsdp = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    if is_fsdp or any(hasattr(p, "placements") or hasattr(p, "ds_id") for p in parameters.values()):
        return
    if runtime is not None and runtime.plan is not None and runtime.plan.zero_stage == 3:
        return
    nothing = torch.zeros((), dtype=torch.int64, device=next(iter(parameters.values())).device)
    own = torch.stack([memory_digest(p) if is_held(p) else nothing for p in parameters.values()])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    for index, (name, parameter) in enumerate(parameters.items()):
        for first, *others in _replicas(parameter, runtime, len(parts)):
            if differ := [rank for rank in others if not torch.equal(parts[rank][index], parts[first][index])]:
                raise DivergenceError(
                    f"step {step}: rank(s) {', '.join(map(str, differ))} have other values of {name} than rank "
                    f"{first}, but must have equal values: something changed the weights, or a gradient, on one rank "
                    "alone (a clip by a local norm, a batch that only one rank skipped, a module left out of the "
                    "wrapper)"
                )


def _replicas(parameter: nn.Parameter, runtime: Runtime | None, world: int) -> list[list[int]]:
    """Return the groups of ranks that must hold equal values of a parameter."""
    if runtime is None:
        return [list(range(world))]
    record = record_of(parameter)
    per_stage = world // runtime.pp.size  # pp is the outermost axis, and tp the innermost one
    holders = [rank for rank in range(world) if rank // per_stage in record.holders]
    apart = 1 if record.layout.is_replicated else runtime.tp.size
    return [holders[first::apart] for first in range(apart)]
