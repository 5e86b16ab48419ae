"""One tensor of which every rank holds a part, made whole on the first rank, a few megabytes at a time.

A parameter is cut twice: into tensor-parallel shards (a ``ShardRecord`` says how), and a shard, flattened, into one
stretch a data-parallel rank (a ``RowLayout`` of its elements; replicated where each holds the whole shard).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.faults.interpose import own_collectives
from meshwright.optim.runtime import Runtime
from meshwright.parallel.collectives import Axis
from meshwright.parallel.row_layout import RowLayout, ShardRecord, Span

_CHUNK = 4 * 2**20  # bytes in flight: the first rank holds so much beside the full tensor


def is_first(runtime: Runtime) -> bool:
    """Whether this is the rank that gets whole tensors."""
    return runtime.tp.rank == 0 and runtime.dp.rank == 0


def assemble(part: Tensor, record: ShardRecord, cut: RowLayout, runtime: Runtime) -> Tensor | None:
    """The whole tensor on the first rank, None elsewhere; every rank calls it.

    On the CPU and in memory of its own, unless this rank's part is all of it.

    Args:
        part: this rank's elements of its flattened shard, ``cut.spans[dp rank]``.
        record: how the tensor is sharded over tp.
        cut: how a shard is cut over dp.
    """
    tp, dp, layout = runtime.tp, runtime.dp, record.layout
    if not record.is_sharded and cut.is_replicated:
        return part.view(record.global_shape) if is_first(runtime) else None
    full = torch.empty(record.global_shape, dtype=part.dtype) if is_first(runtime) else None
    for column, row, start, stop in _pieces(layout, cut, max(1, _CHUNK // part.element_size())):
        if not (is_first(runtime) or (tp.rank == column and dp.rank in (0, row))):
            continue
        piece = part.new_empty(stop - start)
        if (tp.rank, dp.rank) == (column, row):
            own = cut.spans[dp.rank][0][0]
            piece = part[start - own : stop - own]
        if tp.rank == column:
            _hop(piece, row, dp)
        if dp.rank == 0:
            _hop(piece, column, tp)
        if full is not None:
            _place(full, piece.cpu(), layout, column, start)
    return full


def _pieces(layout: RowLayout, cut: RowLayout, most: int) -> Iterator[tuple[int, int, int, int]]:
    """(tp rank, dp rank, first and last element of the tp rank's flattened shard), so many elements at a time.

    What several ranks hold comes from the first of them.
    """
    covered: set[Span] = set()
    for column, rows in enumerate(layout.spans):
        if covered.issuperset(rows):
            continue
        covered.update(rows)
        sent: set[Span] = set()
        for row, ((start, stop),) in enumerate(cut.spans):
            if (start, stop) not in sent:
                for first in range(start, stop, most):
                    yield column, row, first, min(first + most, stop)
            sent.add((start, stop))


@own_collectives()
def _hop(piece: Tensor, source: int, axis: Axis) -> None:
    """Bring a piece from one rank of an axis to its first."""
    if source == 0 or axis.rank not in (0, source):
        return
    assert axis.group is not None
    if axis.rank == source:
        dist.send(piece, dist.get_global_rank(axis.group, 0), group=axis.group)
    else:
        dist.recv(piece, dist.get_global_rank(axis.group, source), group=axis.group)


def _place(full: Tensor, piece: Tensor, layout: RowLayout, rank: int, start: int) -> None:
    """Write the elements of a rank's flattened shard from ``start`` on to where they belong, padding left out."""
    shape = full.shape or torch.Size([1])
    inner = shape[layout.dim + 1 :].numel()
    table = full.view(-1, shape[layout.dim] * inner)
    width = layout.local_size * inner  # the shard is as high as the table, and so wide
    for rows, columns, block in _rectangles(piece, start, width):
        offset = 0
        for first, last in layout.spans[rank]:
            low, high = max(offset, columns.start), min(offset + (last - first) * inner, columns.stop)
            if low < high:
                shift = first * inner - offset
                table[rows, low + shift : high + shift] = block[:, low - columns.start : high - columns.start]
            offset += (last - first) * inner


def _rectangles(piece: Tensor, start: int, width: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """A run of a flattened table as at most three rectangles: the end of a row, whole rows, the start of one."""
    taken = 0
    while taken < len(piece):
        row, column = divmod(start + taken, width)
        height = max(1, (len(piece) - taken) // width) if column == 0 else 1
        reach = min(width - column, len(piece) - taken)
        block = piece[taken : taken + height * reach].view(height, reach)
        yield slice(row, row + height), slice(column, column + reach), block
        taken += height * reach
