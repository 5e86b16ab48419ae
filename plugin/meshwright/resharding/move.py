"""Moves a tensor between layouts without autograd: by torch's ``redistribute``, or point to point, where a rank gets
only what it lacks.

Every rank computes the same list of pieces from the two layouts alone, so nothing is negotiated.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshwright.faults.interpose import own_collectives
from meshwright.layout.row_layout import Span, StridedBlock, copy_blocks, numel, packed
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.process_group import wait_for_message, wire_device
from meshwright.resharding.layouts import COLLECTIVE_DTYPES, Layout, of_gradient, process_mesh


@dataclass(frozen=True)
class TransferPiece:
    """What goes from rank ``source`` to rank ``target``; a local copy if they are the same rank.

    In the blocks, ``local`` is a position in what the target stores, and ``whole`` one in what the source stores.
    """

    source: int
    target: int
    blocks: tuple[StridedBlock, ...]


@functools.lru_cache(maxsize=256)
def plan(shape: tuple[int, ...], source: Layout, target: Layout) -> tuple[TransferPiece, ...]:
    """Return the pieces that fill every rank of ``target`` from ``source``, in the same order on all ranks.

    A rank copies the elements that it already holds. Replicas share the rest of the work: a piece comes from the
    holder that has sent the least so far.

    Args:
        shape: the global shape.
        source: a layout without ``Partial``.
        target: any layout; ranks that start a sum with zeros receive nothing.

    Example:
        >>> from meshwright.mesh.process_mesh import ProcessMesh
        >>> halves, whole = Layout(ProcessMesh([0, 1]), (Shard(0),)), Layout(ProcessMesh([1, 2]), (Replicate(),))
        >>> for piece in plan((4,), halves, whole):
        ...     print(piece.source, "->", piece.target, numel(piece.blocks))
        0 -> 1 2
        1 -> 1 2
        0 -> 2 2
        1 -> 2 2
    """
    assert not any(isinstance(placement, Partial) for placement in source.placements)
    holders: dict[TensorLayout, list[int]] = defaultdict(list)
    for rank in source.mesh.ranks:
        holders[source.part(shape, rank)].append(rank)
    sent: Counter[int] = Counter()
    pieces = []
    for rank in filter(target.has_value, target.mesh.ranks):
        wanted = target.part(shape, rank)
        # The parts of a layout do not overlap: two ranks hold the same one or share no element.
        for held, ranks in holders.items():
            if not (blocks := _shared(wanted, held)):
                continue
            sender = rank if rank in ranks else min(ranks, key=sent.__getitem__)
            sent[sender] += numel(blocks) if sender != rank else 0
            pieces.append(TransferPiece(sender, rank, blocks))
    return tuple(pieces)


def _shared(wanted: TensorLayout, held: TensorLayout) -> tuple[StridedBlock, ...]:
    """Return the elements that two parts share, as blocks from the storage of ``held`` to that of ``wanted``.

    Each part is a box, and so is what they share. Both parts have it in the same runs, so that the time is linear.
    """
    runs = zip(wanted.blocks(spans=_box(held)), held.blocks(spans=_box(wanted)), strict=True)
    return tuple(
        StridedBlock(to.local, at.local, to.length, to.count, to.local_stride, at.local_stride) for to, at in runs
    )


def _box(part: TensorLayout) -> dict[int, tuple[Span, ...]]:
    return {rows.dim: rows.spans[0] for _, rows in part.cuts}


def traffic(pieces: Iterable[TransferPiece]) -> int:
    """Return the number of elements that are sent from one rank to another."""
    return sum(numel(piece.blocks) for piece in pieces if piece.source != piece.target)


@functools.lru_cache(maxsize=256)
def without_partial(shape: tuple[int, ...], source: Layout, target: Layout) -> Layout:
    """Return the layout to reduce ``source`` to before a transfer: the one that moves the fewest elements.

    An all-reduce moves twice as much as a reduce-scatter, but leaves replicas, so the transfer may need fewer pieces.
    """
    shards = [source.with_partial(Shard(dim)) for dim in range(len(shape))]
    stored = sum(source.part(shape, rank).local_numel for rank in source.mesh.ranks)

    def moved(reduced: Layout) -> float:
        once = 0.0
        for placement, size in zip(source.placements, source.mesh.shape, strict=True):
            if isinstance(placement, Partial):
                once += stored * (size - 1) / size
        return once * (1 if reduced in shards else 2) + traffic(plan(shape, reduced, target))

    return min([source.with_partial(Replicate()), *shards], key=moved)


def transfer(held: Tensor, shape: tuple[int, ...], source: Layout, target: Layout, device: torch.device) -> Tensor:
    """Return this rank's part of a tensor under ``target``; every rank of both layouts must make this call.

    Args:
        held: the tensor that this rank stores under ``source``; outside that mesh, only its dtype is used.
        shape: the global shape.
        source: a layout without ``Partial``.
        target: any layout.
        device: the device of the result.
    """
    me = dist.get_rank()
    outgoing: dict[int, list[StridedBlock]] = {}
    incoming: dict[int, list[StridedBlock]] = {}
    for piece in plan(shape, source, target):
        if piece.source == me:
            outgoing[piece.target] = packed(piece.blocks)
        if piece.target == me:
            incoming[piece.source] = packed(block.swapped() for block in piece.blocks)

    messages: dict[int, Tensor] = {}
    for rank, blocks in outgoing.items():
        message = held.new_empty(numel(blocks))
        copy_blocks(message, held.contiguous().view(-1), blocks)
        messages[rank] = message.view(torch.uint8)  # backends support bytes, but not every dtype
    own = messages.pop(me, None)
    lengths = {rank: numel(blocks) * held.element_size() for rank, blocks in incoming.items() if rank != me}
    received = _exchange(messages, lengths, device)
    if own is not None:
        received[me] = own

    if me not in target.mesh:
        return torch.empty(0, dtype=held.dtype, device=device)
    # Zeros for the ranks that start a sum with zeros; all other ranks overwrite them.
    result = torch.zeros(target.part(shape, me).local_shape, dtype=held.dtype, device=device)
    for rank, blocks in incoming.items():
        values = received[rank].to(device).view(held.dtype)
        copy_blocks(result.view(-1), values, [block.swapped() for block in blocks])
    return result


def _exchange(outgoing: dict[int, Tensor], lengths: dict[int, int], device: torch.device) -> dict[int, Tensor]:
    """Send each rank its bytes, and return the bytes received from each rank."""
    wire = wire_device(device)
    received = {rank: torch.empty(length, dtype=torch.uint8, device=wire) for rank, length in lengths.items()}
    messages = {rank: message.to(wire) for rank, message in outgoing.items()}
    operations = [dist.P2POp(dist.isend, message, rank) for rank, message in messages.items()]
    operations += [dist.P2POp(dist.irecv, buffer, rank) for rank, buffer in received.items()]
    with own_collectives():
        for work in dist.batch_isend_irecv(operations) if operations else ():
            wait_for_message(work, None, wire)
    return received


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
