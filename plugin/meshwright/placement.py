"""``shard_tensor`` places a tensor on a mesh; ``reshard`` moves it to other placements or another mesh.

Both functions return torch's ``DTensor``. Every rank of the world must call them, in the same order. A rank outside
the meshes gets an empty local tensor, so that all ranks can run the same program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshwright.autograd import RuntimeFunction
from meshwright.compiling import eager
from meshwright.faults.memory_digest import value_digest
from meshwright.faults.together import Claim, agreed
from meshwright.mesh.process_group import ensure_process_group
from meshwright.mesh.process_mesh import ProcessMesh
from meshwright.resharding.layouts import (
    Layout,
    check_dtype,
    decode,
    encode,
    layout_of,
    make_layout,
    of_gradient,
    process_mesh,
)
from meshwright.resharding.move import move, settle, wrap
from meshwright.resharding.plain_operands import PlainOperands

__all__ = ["Partial", "Replicate", "Shard", "reshard", "shard_tensor"]

Mesh = ProcessMesh | DeviceMesh


@eager
def shard_tensor(data: object, mesh: Mesh, placements: Sequence[Placement]) -> DTensor:
    """Place a tensor, which every rank has in full, on a mesh.

    If no process group is initialised, the call joins the launcher's, or creates a group of this process alone. Each
    rank copies its own part; no data is sent. Under ``Partial("sum")``, the first rank of the axis has the value and
    the others have zeros. Under avg, max and min, every rank has the value. If the tensor requires a gradient, it
    receives the full gradient on every rank of the world. An ``nn.Parameter`` becomes a new ``nn.Parameter``, which is
    a leaf that modules and optimizers accept. In torch's operations, a plain tensor may then stand beside the result:
    it means the same value on every rank, and is compared.

    Args:
        data: a tensor, an array, nested lists or a number; the same on every rank of the world. A DTensor that has
            this mesh and these placements is returned as it is.
        mesh: a ``ProcessMesh``, or a ``DeviceMesh`` that is the same on every rank.
        placements: one ``Shard(dim)``, ``Replicate()`` or ``Partial(op)`` per mesh axis. Two axes may shard the same
            dim, a dim may be shorter than its axis, and negative dims count from the last.

    Returns:
        A DTensor of the global shape; its local tensor is empty on a rank outside the mesh.

    Raises:
        ValueError: on every rank, if the number or kind of the placements is wrong, the tensor lacks a dim, integers
            would be averaged, the mesh has a rank outside the world, or the ranks' calls or their data differ.

    Example:
        >>> mesh = mw.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "tp"])  # doctest: +SKIP
        >>> mw.shard_tensor(torch.ones(8, 4), mesh, [mw.Shard(0), mw.Shard(1)]).to_local().shape  # doctest: +SKIP
        torch.Size([4, 2])
    """

    ensure_process_group()
    placed = _shard("shard_tensor", data, mesh, placements)
    if isinstance(data, nn.Parameter) and not isinstance(data, DTensor):
        return cast(DTensor, nn.Parameter(placed.detach(), requires_grad=data.requires_grad))
    return placed


def _shard(call: str, data: object, mesh: Mesh, placements: Sequence[Placement]) -> DTensor:
    def check() -> Claim[tuple[Tensor, Layout]]:
        tensor = data if isinstance(data, DTensor) else _as_tensor(data)
        layout = make_layout(mesh, placements, tensor.shape)
        check_dtype(tensor.dtype, layout)
        same = _described(call, tensor) | {
            "is a parameter": str(isinstance(tensor, nn.Parameter)),
            "mesh": _mesh_text(mesh),
            "placements": str(layout),
        }
        if not isinstance(tensor, DTensor):
            return Claim((tensor, layout), same | {f"values in {call}": f"digest {value_digest(tensor):016x}"})
        grid = process_mesh(tensor.device_mesh)
        found = layout.placements if dist.get_rank() not in grid else tensor.placements  # others do not know them
        if not layout.same_grid(Layout(grid, found)) or layout.placements != found:
            raise ValueError("the data is a DTensor already; move it with reshard(data, mesh, placements)")
        return Claim((tensor, layout), same)

    (tensor, layout), _ = agreed(check)
    if isinstance(tensor, DTensor):
        return tensor
    device_mesh = mesh if isinstance(mesh, DeviceMesh) else mesh.to_device_mesh(_device_type(tensor))
    _OPERANDS.accept(device_mesh)
    result: DTensor = _ShardTensor.apply(tensor, device_mesh, layout)
    return result


@eager
def reshard(tensor: DTensor, mesh: Mesh, placements: Sequence[Placement]) -> DTensor:
    """Move a DTensor to other placements, on the same mesh or on a mesh with other ranks or another shape.

    On the same mesh torch's ``redistribute`` moves the data, except to a new ``Partial``, which torch refuses, and for
    dtypes that gloo's or NCCL's collectives do not support. In these cases, and between meshes, each rank receives
    only the elements that it lacks, in point-to-point messages; a ``Partial`` is reduced first. The gradient moves back
    in the same way. It is sharded where the input was sharded, and whole where the input was whole or partial.

    Args:
        tensor: the tensor, with its global shape on every rank, including ranks outside its mesh.
        mesh: a ``ProcessMesh``, or a ``DeviceMesh`` that is the same on every rank.
        placements: one placement per axis of ``mesh``, as for ``shard_tensor``.

    Returns:
        A DTensor of the same global shape and dtype; its local tensor is empty on a rank outside ``mesh``.

    Raises:
        ValueError: on every rank, in the cases of ``shard_tensor``, and if the mesh has another device type or a local
            tensor's shape does not fit its placements.

    Example:
        >>> stage0, stage1 = mw.ProcessMesh([0, 1]), mw.ProcessMesh([2, 3])  # doctest: +SKIP
        >>> y = mw.reshard(x @ w0, stage1, [mw.Replicate()])  # doctest: +SKIP
    """

    ensure_process_group()

    def check() -> Claim[Layout]:
        if not isinstance(tensor, DTensor):
            raise ValueError(
                f"reshard takes a DTensor, got {type(tensor).__name__}; use shard_tensor(tensor, mesh, placements)"
            )
        target = make_layout(mesh, placements, tensor.shape)
        check_dtype(tensor.dtype, target)
        if isinstance(mesh, DeviceMesh) and mesh.device_type != tensor.device_mesh.device_type:
            types = f"{tensor.device_mesh.device_type}, the mesh on {mesh.device_type}"
            raise ValueError(f"the tensor is on {types}; use a mesh of the tensor's device type")
        same = _described("reshard", tensor) | {
            "from mesh": _mesh_text(tensor.device_mesh),
            "mesh": _mesh_text(mesh),
            "placements": str(target),
        }
        if dist.get_rank() not in process_mesh(tensor.device_mesh):
            return Claim(target, same)
        source = layout_of(tensor)
        check_dtype(tensor.dtype, source)
        return Claim(target, same, {"from placements": str(source)}, encode(source.placements))

    target, number = agreed(check)
    grid = process_mesh(tensor.device_mesh)
    source = Layout(grid, decode(number, grid.ndim))
    device_type = tensor.device_mesh.device_type
    device_mesh = mesh if isinstance(mesh, DeviceMesh) else mesh.to_device_mesh(device_type)
    _OPERANDS.accept(device_mesh)
    result: DTensor = _Reshard.apply(tensor, source, device_mesh, target)
    return result


class _Reshard(torch.autograd.Function):
    """Moves the tensor in forward, and its gradient back in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, source: Layout, device_mesh: DeviceMesh, target: Layout) -> DTensor:
        ctx.device_mesh, ctx.source, ctx.target = tensor.device_mesh, source, target
        return move(tensor, source, device_mesh, target.placements)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None, None]:
        grad, layout = settle(grad, ctx.target, ctx.source)
        return _Reshard.apply(grad, layout, ctx.device_mesh, of_gradient(ctx.source)), None, None, None


class _ShardTensor(RuntimeFunction):
    """Takes each rank's part of a full tensor in forward; returns the full gradient on every rank in backward."""

    is_linear = True
    instead = "Differentiate with respect to the DTensor that shard_tensor returned, as in loss_of(dtensor)"

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device_mesh: DeviceMesh, layout: Layout) -> DTensor:
        ctx.device, ctx.layout = tensor.device, layout
        return wrap(_own_part(tensor, layout, device_mesh), device_mesh, layout.placements, tensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None, None]:
        # The gradient goes to the whole world, since every rank computed the tensor and needs the same gradient.
        world = Layout(ProcessMesh(range(dist.get_world_size()), ["world"]), (Replicate(),))
        grad, layout = settle(grad, ctx.layout, world)
        device_mesh = world.mesh.to_device_mesh(grad.device_mesh.device_type)
        return move(grad, layout, device_mesh, world.placements).to_local().to(ctx.device), None, None


def accept_plain_tensors(device_mesh: DeviceMesh) -> None:
    """Let plain tensors stand beside DTensors on this mesh in torch's operations."""
    _OPERANDS.accept(device_mesh)


@eager
def _place_beside(tensor: Tensor, device_mesh: DeviceMesh, name: str) -> DTensor:
    call = f"{name}, of a plain tensor beside a DTensor"
    return _shard(call, tensor, device_mesh, [Replicate()] * device_mesh.ndim)


@eager
def _gather(tensor: DTensor) -> Tensor:
    world = ProcessMesh(range(dist.get_world_size()), ["world"]).to_device_mesh(tensor.device_mesh.device_type)
    return reshard(tensor, world, [Replicate()]).to_local()


_OPERANDS = PlainOperands(place=_place_beside, gather=_gather)


def _as_tensor(data: object) -> Tensor:
    try:
        return torch.as_tensor(data)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"the data must be a tensor, an array, nested lists or a number: {error}") from error


def _own_part(tensor: Tensor, layout: Layout, device_mesh: DeviceMesh) -> Tensor:
    """Return a copy of this rank's part of the tensor, so that writes to either do not change the other."""
    rank = dist.get_rank()
    if rank not in layout.mesh:
        return tensor.new_empty(0, device=device_mesh.device_type)
    part = layout.part(tensor.shape, rank).take(tensor)
    part = part if layout.has_value(rank) else torch.zeros_like(part)
    return part.to(device_mesh.device_type)


def _device_type(tensor: Tensor) -> str:
    """Return the tensor's device type, or the process group's first type if the group does not support it."""
    types = [entry.split(":")[0] for entry in dist.get_backend_config().split(",")]
    return tensor.device.type if tensor.device.type in types else types[0]


def _described(call: str, tensor: Tensor) -> dict[str, str]:
    return {
        "call": call,
        "shape": str(tuple(tensor.shape)),
        "dtype": str(tensor.dtype),
        "records gradients": str(tensor.requires_grad and torch.is_grad_enabled()),
    }


def _mesh_text(mesh: Mesh) -> str:
    kind = f" on {mesh.device_type}" if isinstance(mesh, DeviceMesh) else ""
    return f"{process_mesh(mesh)!r}{kind}"
