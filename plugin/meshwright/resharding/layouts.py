"""Converts users' meshes (ours or torch's), placements (with negative dims) and DTensors to checked layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshwright.compiling import real_object
from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.process_mesh import ProcessMesh

_REDUCTIONS = ("sum", "avg", "max", "min")
_SHARDED = 1 + len(_REDUCTIONS)  # codes from here on are Shard(0), Shard(1), ...
_BITS = 7  # bits per placement

# The dtypes that the collectives of both gloo and NCCL support; complex numbers are sent as pairs of reals.
COLLECTIVE_DTYPES = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    }
)


# A cache, since reading the ranks of a DeviceMesh takes longer than a small move.
_described: WeakKeyDictionary[DeviceMesh, ProcessMesh] = WeakKeyDictionary()


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor: a mesh, and one placement for each axis of the mesh.

    Args:
        mesh: the mesh of the ranks.
        placements: one ``Shard``, ``Replicate`` or ``Partial`` per mesh axis, with non-negative dims.

    Example:
        >>> layout = Layout(ProcessMesh([[0, 1], [2, 3]]), (Shard(0), Shard(0)))
        >>> [layout.part((7, 5), rank).local_shape[0] for rank in range(4)]
        [2, 2, 2, 1]
    """

    mesh: ProcessMesh
    placements: tuple[Placement, ...]

    def part(self, shape: Sequence[int], rank: int) -> TensorLayout:
        """Return which elements of a tensor of this shape a rank of the mesh stores.

        Each axis splits a dim as ``torch.chunk`` does: the last parts may be short or empty. If two axes shard the same
        dim, the later axis splits the parts of the earlier axis.
        """
        coordinate = self.mesh.coordinate(rank)
        assert coordinate is not None
        spans = [(0, length) for length in shape]
        for placement, parts, index in zip(self.placements, self.mesh.shape, coordinate, strict=True):
            if isinstance(placement, Shard):
                start, stop = spans[placement.dim]
                step = -(-(stop - start) // parts)
                spans[placement.dim] = min(start + index * step, stop), min(start + (index + 1) * step, stop)
        cuts = tuple(("mesh", RowLayout(dim, shape[dim], ((span,),))) for dim, span in enumerate(spans))
        return TensorLayout(shape=torch.Size(shape), cuts=cuts, place={"mesh": 0})

    def has_value(self, rank: int) -> bool:
        """Return True if a rank of the mesh starts with the values of its part, and False if it starts with zeros.

        Under a partial sum, the first rank of the axis has the value, since dividing it between ranks would round.
        """
        coordinate = self.mesh.coordinate(rank)
        assert coordinate is not None
        sums = (placement.is_partial("sum") for placement in self.placements)
        return all(index == 0 for is_sum, index in zip(sums, coordinate, strict=True) if is_sum)

    def with_partial(self, replacement: Placement) -> Layout:
        """Return this layout with every ``Partial`` replaced."""
        placements = tuple(replacement if isinstance(p, Partial) else p for p in self.placements)
        return Layout(self.mesh, placements)

    def same_grid(self, other: Layout) -> bool:
        """Return whether both meshes have the same ranks in the same places, regardless of axis names."""
        return (self.mesh.shape, self.mesh.ranks) == (other.mesh.shape, other.mesh.ranks)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.placements))}]"


def of_gradient(layout: Layout) -> Layout:
    """Return the layout of a tensor's gradient: the tensor's layout, with ``Replicate`` in place of ``Partial``."""
    return layout.with_partial(Replicate())


def process_mesh(mesh: ProcessMesh | DeviceMesh) -> ProcessMesh:
    """Return a mesh as a ``ProcessMesh``, with its ranks and axis names.

    Raises:
        ValueError: if ``mesh`` is not a mesh, or is a ``DeviceMesh`` with a repeated rank.
    """
    if isinstance(mesh, ProcessMesh):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"the mesh must be a ProcessMesh or a DeviceMesh, got {type(mesh).__name__}")
    if mesh not in _described:
        _described[mesh] = ProcessMesh(mesh.mesh, mesh.mesh_dim_names)
    return _described[mesh]


def make_layout(mesh: ProcessMesh | DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> Layout:
    """Return the layout of a tensor of this shape, with non-negative dims.

    Raises:
        ValueError: if the number or kind of the placements is wrong, the tensor lacks a dim, the mesh has a rank
            outside the world, or the groups of a ``DeviceMesh`` are in another order than its ranks.
    """
    grid = process_mesh(mesh)
    rank = dist.get_rank()
    if isinstance(mesh, DeviceMesh) and rank in grid:
        orders = {name: dist.get_process_group_ranks(mesh.get_group(i)) for i, name in enumerate(grid.dim_names)}
        for name, order in orders.items():
            if tuple(order) != grid.axis_ranks(rank, name):
                raise ValueError(
                    f"torch sorted the ranks {grid.axis_ranks(rank, name)} of axis {name!r} into {tuple(order)}, so "
                    "its collectives would mix up the parts; pass a ProcessMesh, which keeps the order"
                )
    if max(grid.ranks) >= (world_size := dist.get_world_size()):
        raise ValueError(
            f"rank {max(grid.ranks)} is outside the world of {world_size} ranks; launch with: torchrun "
            f"--nproc-per-node {max(grid.ranks) + 1} SCRIPT, or use a mesh of fewer ranks:\n{grid}"
        )
    if isinstance(placements, Placement) or not isinstance(placements, Sequence):
        raise ValueError(f"placements must be a list with one placement per mesh axis, got {placements!r}")
    if len(placements) != grid.ndim:
        raise ValueError(
            f"{len(placements)} placements {list(placements)} for the {grid.ndim} axes {grid.dim_names} of the mesh; "
            f"give one per axis"
        )
    layout = Layout(grid, tuple(_checked(real_object(placement), len(shape)) for placement in placements))
    reductions = {placement.reduce_op for placement in layout.placements if isinstance(placement, Partial)}
    if len(reductions - {"avg"}) > 1 or (len(reductions) > 1 and "sum" not in reductions):
        raise ValueError(
            f"Partial {' and '.join(sorted(reductions))} in one tensor have no defined order; "
            f"use one reduction on all axes, or reshard one axis to Replicate first"
        )
    return layout


def layout_of(tensor: DTensor) -> Layout:
    """Return the layout of a DTensor; this rank must be in the DTensor's mesh.

    Raises:
        ValueError: in the cases of ``make_layout``, and if the local tensor's shape does not fit the placements.
    """
    layout = make_layout(tensor.device_mesh, tensor.placements, tensor.shape)
    rank = dist.get_rank()
    expected, actual = tuple(layout.part(tensor.shape, rank).local_shape), tuple(tensor.to_local().shape)
    if expected != actual:
        raise ValueError(
            f"the local tensor has shape {actual}, but {layout} of {tuple(tensor.shape)} puts {expected} on "
            f"rank {rank}; for parts of unequal size give DTensor.from_local the global shape and stride"
        )
    return layout


def encode(placements: Sequence[Placement]) -> int:
    """Return placements as one integer below 2**63, which a collective can send.

    Raises:
        ValueError: if there are more axes or dims than fit.

    Example:
        >>> decode(encode([Shard(1), Partial("avg")]), 2)
        (Shard(dim=1), Partial(avg))
    """
    number = 0
    for placement in reversed(placements):
        code = 0
        if isinstance(placement, Shard):
            code = _SHARDED + placement.dim
        elif isinstance(placement, Partial):
            code = 1 + _REDUCTIONS.index(placement.reduce_op)
        number = number << _BITS | code
        if number >= 2**63 or code >= 2**_BITS:
            raise ValueError(
                f"placements may have up to {63 // _BITS} axes and {2**_BITS - _SHARDED} dims, got {placements}"
            )
    return number


def decode(number: int, ndim: int) -> tuple[Placement, ...]:
    """Return the placements that ``encode`` turned into ``number``, for a mesh of ``ndim`` axes."""
    codes = [number >> _BITS * axis & (2**_BITS - 1) for axis in range(ndim)]
    named = [Replicate(), *map(Partial, _REDUCTIONS)]
    return tuple(Shard(code - _SHARDED) if code >= _SHARDED else named[code] for code in codes)


def check_dtype(dtype: torch.dtype, layout: Layout) -> None:
    """Raise unless the values of each ``Partial`` can be reduced.

    Raises:
        ValueError: if integers would be averaged, complex numbers ordered, or collectives do not support the dtype.
    """
    for placement in layout.placements:
        if not isinstance(placement, Partial):
            continue
        op = placement.reduce_op
        if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"Partial('avg') of {dtype}: an average need not be an integer; use sum, or a float dtype")
        if op in ("max", "min") and dtype.is_complex:
            raise ValueError(f"Partial({op!r}) of {dtype}: complex numbers have no order; use sum or avg")
        if dtype not in COLLECTIVE_DTYPES:
            raise ValueError(f"Partial({op!r}) of {dtype}: backends do not reduce it; convert to another dtype first")


def _checked(placement: Placement, ndim: int) -> Placement:
    # Exact types only, since subclasses such as FSDP's strided shards arrange the elements in another way.
    if type(placement) is Shard:
        if not -ndim <= placement.dim < ndim:
            change = f"use a dim from {-ndim} to {ndim - 1}" if ndim else "use Replicate() or Partial()"
            raise ValueError(f"Shard({placement.dim}) of a tensor with {ndim} dims; {change}")
        return Shard(placement.dim % ndim)
    if type(placement) is Partial:
        if placement.reduce_op not in _REDUCTIONS:
            raise ValueError(f"Partial({placement.reduce_op!r}): the reductions are {', '.join(_REDUCTIONS)}")
        return placement
    if type(placement) is not Replicate:
        raise ValueError(f"a placement must be Shard(dim), Replicate() or Partial(op), got {placement!r}")
    return placement
