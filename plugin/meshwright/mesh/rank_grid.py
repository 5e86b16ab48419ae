"""The parallel axes of a plan, by name and in order, and the grids of ranks that they span.

All other code asks for sizes by name or iterates over the names. Ranks are converted to nested lists and to text, so
that a mesh can be read, written and shown in an error.

This module does not import torch, so that the planner and ``--help`` can use it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

AXES = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor"}  # name -> kind, the outermost axis first
PLAN_AXES = ("dp", "tp", "cp", "pp")  # the same axes in the order in which a plan is written
# Axis -> the fields of a plan that say how it is used, and mean nothing if its size is 1.
OPTIONS = {"cp": ("context", "ulysses"), "pp": ("schedule", "chunks", "stages"), "tp": ("sequence_parallel",)}

_EDGE = 4  # indices shown at each end of a long axis
_LONG = 16  # an axis up to this size is shown whole


class AxisSizes:
    """The sizes of the axes by name, for a dataclass with a field or a property for each axis."""

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, from the outermost to the innermost."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def sizes_beside_dp(self) -> dict[str, int]:
        """The sizes of the other axes, whose ranks have the same rows of a batch, in the order of a plan."""
        return {name: getattr(self, name) for name in PLAN_AXES if name != "dp"}

    @property
    def group_sizes(self) -> dict[str, int]:
        """The number of ranks that communicate for each axis: gradients are averaged over dp and cp together."""
        sizes = self.sizes
        return sizes | {"dp": sizes["dp"] * sizes["cp"]}

    @property
    def world_size(self) -> int:
        """The number of ranks: the product of the sizes."""
        return math.prod(self.sizes.values())

    def can_share_experts(self, ranks: int) -> bool:
        """Return whether runs of so many neighbours of dp x cp x tp are parts of a group of tp, or whole groups."""
        tp = self.sizes["tp"]
        return self.world_size // self.sizes["pp"] % ranks == 0 and (ranks % tp == 0 or tp % ranks == 0)

    def product(self, *axes: str) -> str:
        """Return the sizes of these axes, by default of all, as in "dp=2 x tp=2"."""
        return " x ".join(f"{name}={getattr(self, name)}" for name in axes or PLAN_AXES)


def flatten(ranks: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the row-major ranks of nested sequences, a tensor or an array.

    Raises:
        ValueError: if rows are ragged or a rank is not an int.

    Example:
        >>> flatten([[0, 1], [2, 3]])
        ((2, 2), (0, 1, 2, 3))
    """
    # Plain ints, since a tensor made while a planner traces with fake tensors would have no values.
    ranks = ranks.tolist() if hasattr(ranks, "tolist") else ranks
    if isinstance(ranks, Sequence) and not isinstance(ranks, (str, bytes)):
        parts = [flatten(item) for item in ranks]
        shapes = sorted({shape for shape, _ in parts})
        if len(shapes) > 1:
            raise ValueError(f"the rows of a mesh must have one shape, got {shapes}")
        return (len(parts), *(shapes[0] if shapes else ())), tuple(rank for _, row in parts for rank in row)
    if isinstance(ranks, bool) or not isinstance(ranks, SupportsIndex):
        raise ValueError(f"a rank is an int, got {ranks!r}")
    return (), (operator.index(ranks),)


def nest(ranks: Sequence[int], shape: Sequence[int]) -> list[Any]:
    """Return row-major ranks as nested lists of this shape.

    Example:
        >>> nest(range(4), (2, 2))
        [[0, 1], [2, 3]]
    """
    if len(shape) == 1:
        return list(ranks)
    block = len(ranks) // max(shape[0], 1)
    return [nest(ranks[row * block : (row + 1) * block], shape[1:]) for row in range(shape[0])]


def grid_text(ranks: Sequence[int], shape: Sequence[int], names: Sequence[str], rank: int | None = None) -> str:
    """Return row-major ranks as a text grid of the axes larger than 1.

    The last two axes are rows and columns. Each position on the other axes is a block with a title. Long axes
    are shortened in the middle.

    Args:
        ranks: the ranks, row-major.
        shape: the size of each axis.
        names: the name of each axis.
        rank: a rank to show in brackets.

    Example:
        >>> print(grid_text(range(4), (2, 1, 2), ("dp", "cp", "tp"), rank=3))
              tp=0  tp=1
        dp=0     0     1
        dp=1     2   [3]
    """
    axes = [(name, size) for name, size in zip(names, shape, strict=True) if size > 1] or [(names[-1], 1)]
    *leading, (across, columns) = axes
    down, rows = leading.pop() if leading else ("", 1)
    marked = tuple(ranks).index(rank) if rank is not None and rank in ranks else None
    block_size = rows * columns

    def shown(size: int, stride: int) -> list[int | None]:
        """Return the indices to show along an axis, including the marked rank's. None stands for omitted indices."""
        if size <= _LONG:
            return list(range(size))
        kept = {*range(_EDGE), *range(size - _EDGE, size)}
        if marked is not None:
            kept.add(marked // stride % size)
        pairs = itertools.pairwise(sorted(kept))
        return [0, *(index for a, b in pairs for index in ((b,) if b == a + 1 else (None, b)))]

    def cell(block: int, row: int | None, column: int | None) -> str:
        if row is None or column is None:
            return "..."
        position = block * block_size + row * columns + column
        return f"[{ranks[position]}]" if position == marked else str(ranks[position])

    column_indices, row_indices = shown(columns, 1), shown(rows, columns)
    labels = [""] if down else []
    header = [*labels, *("..." if column is None else f"{across}={column}" for column in column_indices)]
    blocks: list[str] = []
    for block in shown(math.prod(size for _, size in leading), block_size):
        if block is None:
            blocks.append("...")
            continue
        table = [header]
        for row in row_indices:
            labels = ["..." if row is None else f"{down}={row}"] if down else []
            table.append([*labels, *(cell(block, row, column) for column in column_indices)])
        title = _title(block, leading)
        blocks.append("\n".join([*([title] if title else []), *_aligned(table)]))
    return "\n\n".join(blocks)


def _title(block: int, leading: Sequence[tuple[str, int]]) -> str:
    parts: list[str] = []
    for name, size in reversed(leading):
        block, index = divmod(block, size)
        parts.append(f"{name}={index}")
    return ", ".join(reversed(parts))


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
