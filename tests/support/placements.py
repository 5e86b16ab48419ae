"""What one process says about placements: written with plain slices and index sets, nothing of the product's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshwright import ProcessMesh

EVERY = (Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("avg"), Partial("max"), Partial("min"))
Placements = tuple[Placement, ...]


def placements_of(ndim: int) -> list[Placements]:
    """Every list of placements for a mesh of ``ndim`` axes that DTensor allows: one reduction, or sum with avg."""
    lists = itertools.product(EVERY, repeat=ndim)
    reductions = [({p.reduce_op for p in each if isinstance(p, Partial)}, each) for each in lists]
    return [each for ops, each in reductions if len(ops) < 2 or ops == {"sum", "avg"}]


@dataclass(frozen=True)
class Case:
    """One move: a shape, and where the tensor comes from and goes to."""

    shape: tuple[int, ...]
    source: ProcessMesh
    from_placements: Placements
    target: ProcessMesh
    to_placements: Placements

    def parts(self) -> Tensor:
        """What each rank of the source contributes, by mesh coordinate, whole along the dims.

        Whole numbers, so that sums are the same in any order; multiples of 12, so that averages are whole too.
        """
        generator = torch.Generator().manual_seed(hash((self.shape, self.source.shape)) % 1000)
        placed = zip(self.source.shape, self.from_placements, strict=True)
        mesh_shape = [n if isinstance(p, Partial) else 1 for n, p in placed]
        parts = 12 * torch.randint(-99, 99, (*mesh_shape, *self.shape), generator=generator).double()
        return parts.expand(*self.source.shape, *self.shape)

    def gradient(self) -> Tensor:
        return torch.arange(1.0, 1 + torch.Size(self.shape).numel(), dtype=torch.float64).view(self.shape)


def covering(cases: Sequence[Case]) -> list[Case]:
    """A part of the cases in which each combination of three placements occurs, of the four between two meshes."""
    chosen, covered = dict[int, Case](), set[tuple[tuple[int, Placement], ...]]()
    for least in (4, 3, 2, 1):  # how many combinations a case has to add
        for number, case in enumerate(cases):
            placements = enumerate((*case.from_placements, *case.to_placements))
            new = set(itertools.combinations(placements, 3)) - covered
            if len(new) >= least:
                covered |= new
                chosen[number] = case
    return list(chosen.values())


def shard_of(whole: Tensor, mesh: ProcessMesh, placements: Placements, rank: int) -> Tensor:
    """The part that a rank stores."""
    for placement, count, index in zip(placements, mesh.shape, mesh.coordinate(rank), strict=True):
        if isinstance(placement, Shard):
            chunks = whole.chunk(count, placement.dim)
            whole = chunks[index] if index < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


def reduced(parts: Tensor, placements: Placements) -> Tensor:
    """The tensor that all contributions make: [*mesh, *shape] -> [*shape]. Replicas must be equal."""
    for placement in placements:  # each reduces the first dim away
        if isinstance(placement, Partial):
            operations = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin}
            parts = operations[placement.reduce_op](parts, 0)
        else:
            assert all(torch.equal(part, parts[0]) for part in parts)
            parts = parts[0]
    return parts


def joined(locals_by_rank: Sequence[Tensor], mesh: ProcessMesh, placements: Placements, shape: Sequence[int]) -> Tensor:
    """The tensor whose parts the ranks hold; asserts that every part has its own shape and that replicas are equal."""
    indices = torch.arange(torch.Size(shape).numel()).view(shape)
    sharded = [axis for axis, placement in enumerate(placements) if isinstance(placement, Shard)]
    kept = [n for axis, n in enumerate(mesh.shape) if axis not in sharded]
    parts = torch.full((*kept, indices.numel()), torch.nan, dtype=torch.float64)
    for rank in mesh.ranks:
        where = shard_of(indices, mesh, placements, rank)
        local = locals_by_rank[rank]
        assert local.shape == where.shape
        coordinate = [index for axis, index in enumerate(mesh.coordinate(rank)) if axis not in sharded]
        parts[tuple(coordinate)][where.flatten()] = local.flatten().double()
    assert not parts.isnan().any()
    return reduced(parts.view(*kept, *shape), [p for p in placements if not isinstance(p, Shard)])


def lacking(case: Case) -> int:
    """How many elements the ranks of the target need and do not store under the source's placements."""
    indices = torch.arange(torch.Size(case.shape).numel()).view(case.shape)
    count = 0
    for rank in case.target.ranks:
        coordinate = case.target.coordinate(rank)
        placed = zip(case.to_placements, coordinate, strict=True)
        sums = [index for placement, index in placed if placement == Partial("sum")]
        if any(sums):
            continue  # starts with zeros
        needed = set(shard_of(indices, case.target, case.to_placements, rank).flatten().tolist())
        if rank in case.source:
            needed -= set(shard_of(indices, case.source, case.from_placements, rank).flatten().tolist())
        count += len(needed)
    return count
