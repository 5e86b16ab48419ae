"""Computes which box of a tensor each rank holds, from the shape, the mesh and the placements alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshwright.mesh.process_mesh import ProcessMesh

Box = tuple[tuple[int, int], ...]  # [start, stop) along each dim


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return [start, stop) of one part, split as ``torch.chunk`` does: the last parts may be short or empty.

    Example:
        >>> [chunk(5, 4, index) for index in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    step = -(-length // parts)
    return min(index * step, length), min((index + 1) * step, length)


def sizes(box: Box) -> tuple[int, ...]:
    """Return the length of a box along each dim."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Return the number of elements in a box; a box without dims holds one, as a scalar does."""
    return math.prod(sizes(box))


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box that two boxes share, or None if they share no element.

    Example:
        >>> intersection(((0, 4), (0, 2)), ((3, 8), (0, 2)))
        ((3, 4), (0, 2))
    """
    shared = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that cut ``box`` out of a tensor that holds just ``outer``."""
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(box, outer, strict=True))


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor: a mesh, and one placement for each axis of the mesh.

    Args:
        mesh: the mesh of the ranks.
        placements: one ``Shard``, ``Replicate`` or ``Partial`` per mesh axis, with non-negative dims.

    Example:
        >>> layout = Layout(ProcessMesh([[0, 1], [2, 3]]), (Shard(0), Shard(0)))
        >>> [layout.box((7, 5), rank) for rank in range(4)]
        [((0, 2), (0, 5)), ((2, 4), (0, 5)), ((4, 6), (0, 5)), ((6, 7), (0, 5))]
    """

    mesh: ProcessMesh
    placements: tuple[Placement, ...]

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """Return the part of a tensor of this shape that a rank of the mesh stores.

        If two axes shard the same dim, the later axis splits the parts of the earlier axis.
        """
        coordinate = self.mesh.coordinate(rank)
        assert coordinate is not None
        box = [(0, length) for length in shape]
        for placement, parts, index in zip(self.placements, self.mesh.shape, coordinate, strict=True):
            if isinstance(placement, Shard):
                base, end = box[placement.dim]
                start, stop = chunk(end - base, parts, index)
                box[placement.dim] = base + start, base + stop
        return tuple(box)

    def has_value(self, rank: int) -> bool:
        """Return True if a rank of the mesh starts with the values of its box, and False if it starts with zeros.

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
