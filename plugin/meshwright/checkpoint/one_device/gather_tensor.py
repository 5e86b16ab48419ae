"""Gather one sharded tensor on the first rank, a few megabytes at a time.

A parameter is cut twice: into tensor-parallel shards (described by a ``TensorLayout``), and each flattened shard into
one span per data-parallel rank (described by a ``RowLayout`` of its elements; replicated if each rank holds the whole
shard).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.one_device.blocks import between, copy_blocks, shard
from meshwright.faults.interpose import own_collectives
from meshwright.layout.row_layout import RowLayout, Span
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Axis
from meshwright.mesh.messages import wait_for_message
from meshwright.optim.runtime import Runtime
from meshwright.parallel.collectives import all_gather

_CHUNK = 4 * 2**20  # bytes sent at a time; the first rank holds them in addition to the full tensor


def is_first(runtime: Runtime) -> bool:
    """Return whether this is the rank that gets whole tensors."""
    return runtime.mesh.is_first


def assemble(part: Tensor, record: TensorLayout, cut: RowLayout, runtime: Runtime) -> Tensor | None:
    """Return the whole tensor on the first rank, None elsewhere; every rank must make the call.

    The tensor is in new memory on the CPU, unless this rank's part is the whole tensor. A tensor of another pipeline
    stage is assembled there and sent on.

    Args:
        part: this rank's elements of its flattened shard, ``cut.spans[dp rank]``.
        record: the record of how the tensor is sharded over tp.
        cut: the layout of a flattened shard over dp.
    """
    holder = record.first_stage
    whole = _of_stage(part, record, cut, runtime) if runtime.mesh.pp.rank == holder else None
    if holder == 0:
        return whole
    if runtime.mesh.tp.rank or runtime.mesh.tokens.rank or runtime.mesh.pp.rank not in (0, holder):
        return None
    full = torch.empty(record.shape, dtype=part.dtype) if whole is None else whole.cpu()
    for piece in full.reshape(-1).split(max(1, _CHUNK // part.element_size())):
        _hop(piece, holder, runtime.mesh.pp)
    return full if runtime.mesh.pp.rank == 0 else None


def _of_stage(part: Tensor, record: TensorLayout, cut: RowLayout, runtime: Runtime) -> Tensor | None:
    """Return the whole tensor on the first rank of its pipeline stage, None on the stage's other ranks."""
    if record.is_over_ep:
        return _of_experts(part, record, runtime)
    tp, dp, layout = runtime.mesh.tp, runtime.mesh.tokens, record.over("tp")
    is_first_here = tp.rank == dp.rank == 0
    if layout.is_replicated and cut.is_replicated:
        return part.view(record.shape) if is_first_here else None
    full = torch.empty(record.shape, dtype=part.dtype) if is_first_here else None
    for column, row, start, stop in _pieces(layout, cut, max(1, _CHUNK // part.element_size())):
        if not (is_first_here or (tp.rank == column and dp.rank in (0, row))):
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


def _of_experts(part: Tensor, record: TensorLayout, runtime: Runtime) -> Tensor | None:
    """Return the whole tensor of experts that are spread over dp on the first rank, None elsewhere."""
    local, rows = part.view(record.local_shape), record.over("ep")
    shards = all_gather(local, runtime.mesh.ep).split(rows.local_size)
    if not is_first(runtime):
        return None
    full = torch.empty(record.shape, dtype=part.dtype)
    for rank, shard_of_rank in enumerate(shards):
        rows.put(full, shard_of_rank, rank)
    return full


def _pieces(layout: RowLayout, cut: RowLayout, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tp rank, dp rank, start, stop) of pieces of at most ``most`` elements of the tp rank's flattened shard.

    Elements that several ranks hold come from the first of these ranks.
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
    """Send a piece from one rank of an axis to the first rank."""
    if source == 0 or axis.rank not in (0, source):
        return
    assert axis.group is not None
    if axis.rank == source:
        work = dist.isend(piece, dist.get_global_rank(axis.group, 0), group=axis.group)
    else:
        work = dist.irecv(piece, dist.get_global_rank(axis.group, source), group=axis.group)
    wait_for_message(work, axis.group, piece.device)


def _place(full: Tensor, piece: Tensor, layout: RowLayout, rank: int, start: int) -> None:
    """Write a piece of a rank's flattened shard, from position ``start`` on, into the full tensor, without padding."""
    blocks = between(shard(full.shape or (1,), layout, rank), start, start + len(piece))
    copy_blocks(full.view(-1), piece, (block.swapped() for block in blocks))
