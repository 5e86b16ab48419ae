"""Checks whether ranks that must hold equal weights still do."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import DivergenceError
from meshwright.faults.memory_digest import memory_digest
from meshwright.optim.runtime import find_runtime


def check_replicas(model: nn.Module, *, step: int) -> None:
    """Raise if a value differs between ranks that must hold it equally, by digests; every rank makes the call.

    A model that ``to_distributed`` or ``mw.DataParallel`` has distributed has a comparison of its own, which knows what
    its ranks share. In other models, as under DDP, all ranks hold the same weights; DDP sends the buffers of rank 0 to
    all ranks in each pass. A model whose weights an engine shards (FSDP, DeepSpeed stage 3) is not checked.

    Raises:
        DivergenceError: on every rank, if values differ; the message names the first one that differs and the ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if (runtime := find_runtime(model)) is not None:
        runtime.compare_replicas()
        return
    parameters = dict(model.named_parameters())
    is_fsdp = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    if is_fsdp or any(hasattr(p, "placements") or hasattr(p, "ds_id") for p in parameters.values()):
        return
    own = torch.stack([memory_digest(p) for p in parameters.values()])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    for index, name in enumerate(parameters):
        if differ := [rank for rank, theirs in enumerate(everyone) if not torch.equal(theirs[index], own[index])]:
            raise DivergenceError(
                f"step {step}: rank(s) {', '.join(map(str, differ))} have other values of {name} than rank "
                f"{dist.get_rank()}, but must have equal values: something changed the weights, or a gradient, on one "
                "rank alone (a clip by a local norm, a batch that only one rank skipped, a module left out of the "
                "wrapper)"
            )
