"""Moves a DTensor, without autograd: by torch's ``redistribute`` if possible, else by a reduction and a transfer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from meshwright.resharding.layouts import COLLECTIVE_DTYPES, Layout, of_gradient, process_mesh
from meshwright.resharding.transfer import transfer, without_partial


def move(tensor: DTensor, source: Layout, device_mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """Return the tensor moved to ``device_mesh`` and ``placements``.

    ``source`` is the tensor's layout, the same on all ranks. The tensor's own placements are right only on the ranks
    of its mesh: outside, torch's operators may choose other placements for their results.
    """
    target = Layout(process_mesh(device_mesh), placements)
    shape = tuple(tensor.shape)
    member = dist.get_rank() in source.mesh
    with torch.no_grad():
        if _torch_can(tensor, source, target):
            moved = tensor.redistribute(placements=placements) if member else tensor
            return wrap(moved.to_local(), device_mesh, placements, shape, moved.stride())
        if any(isinstance(placement, Partial) for placement in source.placements):
            source = without_partial(shape, source, target)
            tensor = tensor.redistribute(placements=source.placements) if member else tensor
        local = transfer(tensor.to_local(), shape, source, target, _device(device_mesh))
        return wrap(local, device_mesh, placements, shape)


def settle(grad: DTensor, layout: Layout, other: Layout) -> tuple[DTensor, Layout]:
    """Return a gradient and its layout, known on all ranks, ready to be moved from ``layout`` to ``other``.

    torch may give a gradient any placements, and only the ranks of its mesh know them. This is enough for a move within
    one mesh. For a move to another mesh, the gradient is first redistributed to its tensor's placements, with
    ``Replicate`` in place of ``Partial``.
    """
    if layout.same_grid(other):
        return grad, Layout(layout.mesh, grad.placements)
    known = of_gradient(layout)
    return grad.redistribute(placements=known.placements), known


def wrap(
    local: Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: tuple[int, ...] | None = None,
) -> DTensor:
    """Return a DTensor of a global shape and stride (default: contiguous) from this rank's part.

    Outside the mesh only the dtype and device of ``local`` matter.
    """
    shape = torch.Size(shape)
    if device_mesh.get_coordinate() is None:
        # DTensor empties ``local``, but takes the global shape of a scalar from it.
        local = local.new_empty(0 if shape else ())
    stride = torch.empty(shape, device="meta").stride() if stride is None else stride
    return DTensor.from_local(local, device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _torch_can(tensor: DTensor, source: Layout, target: Layout) -> bool:
    # torch makes a Partial only out of that same Partial, and its collectives support fewer dtypes.
    pairs = zip(source.placements, target.placements, strict=False)
    return (
        source.same_grid(target)
        and all(old == new for old, new in pairs if isinstance(new, Partial))
        and tensor.dtype in COLLECTIVE_DTYPES
    )


def _device(device_mesh: DeviceMesh) -> torch.device:
    if device_mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_mesh.device_type, torch.get_device_module(device_mesh.device_type).current_device())
