"""Checks whether ranks that must hold equal weights still do."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import DivergenceError
from meshwright.faults.memory_digest import memory_digest
from meshwright.optim.runtime import find_runtime
from meshwright.parallel.row_layout import record_of

logger = logging.getLogger(__name__)


def check_replicas(model: nn.Module, *, step: int) -> None:
    """Raise if a weight differs between ranks that must hold it equally, by digests; every rank makes the call.

    Without a plan, as under DDP, all ranks hold the same weights. In a distributed model the ranks of the dp axis do,
    and for weights that are not sharded also the ranks of the tp axis. A model whose weights are sharded over dp (FSDP,
    DeepSpeed stage 3, ZeRO stage 3) is not checked.

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
    own = torch.stack([memory_digest(p) for p in parameters.values()])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    for index, (name, parameter) in enumerate(parameters.items()):
        is_shard = runtime is not None and record_of(parameter).is_sharded
        apart = runtime.tp.size if runtime is not None and is_shard else 1  # tp is the innermost axis
        for first in range(apart):
            others = range(first, len(parts), apart)
            if differ := [rank for rank in others if not torch.equal(parts[rank][index], parts[first][index])]:
                raise DivergenceError(
                    f"step {step}: rank(s) {', '.join(map(str, differ))} have other values of {name} than rank "
                    f"{first}, but must have equal values: something changed the weights, or a gradient, on one rank "
                    "alone (a clip by a local norm, a batch that only one rank skipped, a module left out of the "
                    "wrapper)"
                )
