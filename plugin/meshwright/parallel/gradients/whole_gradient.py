"""Gather a tensor of which each rank has a part on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.layout.blocks import copy_blocks
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Axis, Mesh
from meshwright.parallel.collectives import all_reduce


def on_every_rank(part: Tensor, layout: TensorLayout, mesh: Mesh) -> Tensor:
    """Return the whole tensor in new memory on every rank; all ranks of the mesh must make the call.

    Each element comes from one rank and is added to zeros, so the sums are exact.

    Args:
        part: what this rank has of the tensor, 1-d; empty on a rank that has nothing of it.
        layout: which elements each rank has.
        mesh: the ranks.
    """
    is_of_stage = not layout.is_staged or mesh.pp.rank == layout.first_stage
    if is_of_stage and not layout.is_cut:
        whole = part.view(layout.shape).clone()
    else:
        whole = torch.zeros(layout.shape, dtype=part.dtype, device=part.device)
    if is_of_stage and layout.is_cut:
        axes = _axes(layout, mesh)
        _put_own(whole.view(-1), part.contiguous(), layout, mesh, is_over_tp=len(axes) == 1)
        for axis in axes:
            all_reduce(whole, axis)
    return all_reduce(whole, mesh.pp) if layout.is_staged else whole


def _axes(layout: TensorLayout, mesh: Mesh) -> list[Axis]:
    """Return the axes over which the ranks of one stage have different parts."""
    is_over_tp = not layout.is_sliced and all(rows.is_replicated or axis == "tp" for axis, rows in layout.cuts)
    return [mesh.tp] if is_over_tp else [mesh.tp, mesh.tokens]


def _put_own(whole: Tensor, part: Tensor, layout: TensorLayout, mesh: Mesh, *, is_over_tp: bool) -> None:
    """Copy into ``whole`` the elements that this rank is the first to have, of the ranks that sum them."""
    for shards, spans in layout.regions(mesh.places):
        for owner, *_ in shards[0]:
            is_own = mesh.places[owner]["tp"] == mesh.tp.rank if is_over_tp else owner == mesh.index
            if is_own:
                copy_blocks(whole, part, [block.swapped() for block in layout.blocks(None, spans)])
