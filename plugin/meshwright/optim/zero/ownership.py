"""Which rank steps which elements of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Axis, Mesh
from meshwright.plan.flat_offsets import packed


def stepped_over(layout: TensorLayout, mesh: Mesh) -> Axis:
    """Return the axis whose ranks have the same elements of a tensor before ZeRO cuts them, and share their steps."""
    axis: Axis = getattr(mesh, _axis(layout))
    return axis


def sliced(layout: TensorLayout, rows: RowLayout) -> TensorLayout:
    """Return the layout of a tensor whose flattened shard is cut into these rows over the axis of ``stepped_over``."""
    return layout.flattened(rows, _axis(layout))


def _axis(layout: TensorLayout) -> str:
    return "copies" if layout.is_over_ep else "tokens"


@dataclass(frozen=True)
class EqualSlices:
    """Decides which elements of the parameters each rank of an axis steps.

    Parameters are packed into flat buckets, and each rank steps one of as many equal segments of each bucket. A segment
    may begin inside of a parameter, so that all ranks step equally many elements::

        [ A A A A A A A A | A A A B B B . . ]    parameters A and B over two ranks

    The optimizer must update each element from that element alone (see :mod:`meshwright.optim.elementwise`).

    Args:
        axis: the axis whose ranks share the steps.
    """

    axis: Axis

    def pack(self, sizes: Sequence[int]) -> tuple[list[int], int]:
        """Return the offset of each parameter in a bucket, then the end of the last; and the bucket's length.

        Args:
            sizes: the number of elements of each parameter on this rank.
        """
        return packed(sizes, self.axis.size)

    def segment(self, numel: int) -> slice:
        """Return this rank's segment of a bucket of ``numel`` elements."""
        length = numel // self.axis.size
        return slice(self.axis.rank * length, (self.axis.rank + 1) * length)

    def rows(self, offset: int, size: int, numel: int) -> RowLayout:
        """Return which elements of a flattened parameter each rank steps.

        Args:
            offset: the parameter's offset in its bucket.
            size: the number of elements of the parameter on this rank.
            numel: the length of the bucket.
        """
        return RowLayout.stretches(offset, size, numel // self.axis.size, self.axis.size)
