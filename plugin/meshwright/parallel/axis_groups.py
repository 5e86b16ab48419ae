"""Make the process groups of an axis that is not one of a device mesh."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.mesh.shared_groups import shared_group
from meshwright.parallel.collectives import Axis


def axis_over(ranks: torch.Tensor, name: str) -> Axis:
    """Make a process group of each row of ranks, and return this rank's place in its own.

    Every rank of the world must make the call. A second call for the same rows and name makes no new groups.

    Args:
        ranks: the global ranks, ``[..., size]``; each rank of the world once.
        name: the name of the axis.
    """
    rank, own = dist.get_rank(), Axis(name)
    for row in ranks.reshape(-1, ranks.shape[-1]).tolist():
        group = shared_group(row, name)
        if rank in row:
            own = Axis(name, size=len(row), rank=row.index(rank), group=group)
    return own
