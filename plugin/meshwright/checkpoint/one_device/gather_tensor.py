"""Gather one tensor, however it is cut, on the first rank, a few megabytes at a time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.faults.interpose import own_collectives
from meshwright.layout.blocks import between, copy_blocks, numel, overlap, packed
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Axis, Mesh, Place
from meshwright.mesh.process_group import wait_for_message

_CHUNK = 4 * 2**20  # bytes sent at a time; the first rank holds them in addition to the full tensor


def assemble(part: Tensor, layout: TensorLayout, mesh: Mesh) -> Tensor | None:
    """Return the whole tensor on the first rank, None elsewhere; every rank must make the call.

    The tensor is in new memory on the CPU, unless this rank's part is the whole tensor.

    Args:
        part: what this rank has of the tensor, 1-d; empty on a rank that has nothing of it.
        layout: which elements each rank has.
        mesh: the ranks.
    """
    if not layout.is_cut and layout.first_stage == 0:
        return part.view(layout.shape) if mesh.is_first else None
    full = torch.empty(layout.shape, dtype=part.dtype) if mesh.is_first else None
    part = part.contiguous()
    step = max(1, _CHUNK // part.element_size())
    for shards, spans in layout.regions(mesh.places):
        for owner, *_ in shards[0]:
            hops = _hops(mesh.places[owner], mesh)
            if not hops and owner != mesh.index:
                continue
            blocks = layout.blocks(mesh.places[owner], spans)
            share = packed(blocks)
            for start in range(0, numel(share), step):
                chunk = between(share, start, start + step)
                piece = part.new_empty(numel(chunk))
                if owner == mesh.index:
                    copy_blocks(piece, part, overlap(chunk, blocks))
                for source, axis in hops:
                    _hop(piece, source, axis)
                if full is not None:
                    copy_blocks(full.view(-1), piece.cpu(), [block.swapped() for block in chunk])
    return full


def _hops(source: Place, mesh: Mesh) -> list[tuple[int, Axis]]:
    """Return the hops from a rank to the first rank, one along each axis, in which this rank takes part."""
    axes = [(mesh.place[name], source[name], axis) for name, axis in mesh.factors.items()]
    return [
        (start, axis)
        for index, (own, start, axis) in enumerate(axes)
        if start and own in (0, start)
        if not any(at for at, _, _ in axes[:index]) and all(at == of for at, of, _ in axes[index + 1 :])
    ]


@own_collectives()
def _hop(piece: Tensor, source: int, axis: Axis) -> None:
    """Send a piece from one rank of an axis to the first rank."""
    assert axis.group is not None
    if axis.rank == source:
        work = dist.isend(piece, dist.get_global_rank(axis.group, 0), group=axis.group)
    else:
        work = dist.irecv(piece, dist.get_global_rank(axis.group, source), group=axis.group)
    wait_for_message(work, axis.group, piece.device)
