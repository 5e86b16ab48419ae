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

    The tensor is in new memory on the CPU, unless this rank's part is the whole tensor. A tensor of another pipeline
    stage is assembled there and sent on, since the other stages do not know how that stage slices it.

    Args:
        part: what this rank has of the tensor, 1-d; empty on a rank that has nothing of it.
        layout: which elements each rank of this rank's stage has.
        mesh: the ranks.
    """
    stage, step = layout.first_stage, max(1, _CHUNK // part.element_size())
    whole = _of_stage(part.contiguous(), layout, mesh, step) if mesh.pp.rank == stage else None
    if stage == 0 or mesh.tp.rank or mesh.tokens.rank or mesh.pp.rank not in (0, stage):
        return whole
    full = torch.empty(layout.shape, dtype=part.dtype) if whole is None else whole
    for values in full.view(-1).split(step):
        piece = values.to(part.device)
        _hop(piece, stage, mesh.pp)
        if whole is None:
            values.copy_(piece)
    return full if whole is None else None


def _of_stage(part: Tensor, layout: TensorLayout, mesh: Mesh, step: int) -> Tensor | None:
    """Return the whole tensor on the first rank of a pipeline stage, None on the stage's other ranks."""
    is_first = mesh.tp.rank == mesh.tokens.rank == 0
    if not layout.is_cut:
        return part.view(layout.shape) if is_first else None
    full = torch.empty(layout.shape, dtype=part.dtype) if is_first else None
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
    """Return the hops from a rank to the first rank of its stage, along tp and then tokens, that this rank is in."""
    tp, tokens = source["tp"], source["tokens"]
    hops = []
    if tp and mesh.tokens.rank == tokens and mesh.tp.rank in (0, tp):
        hops.append((tp, mesh.tp))
    if tokens and mesh.tp.rank == 0 and mesh.tokens.rank in (0, tokens):
        hops.append((tokens, mesh.tokens))
    return hops


@own_collectives()
def _hop(piece: Tensor, source: int, axis: Axis) -> None:
    """Send a piece from one rank of an axis to the first rank."""
    assert axis.group is not None
    if axis.rank == source:
        work = dist.isend(piece, dist.get_global_rank(axis.group, 0), group=axis.group)
    else:
        work = dist.irecv(piece, dist.get_global_rank(axis.group, source), group=axis.group)
    wait_for_message(work, axis.group, piece.device)
