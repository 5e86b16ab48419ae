"""While backward runs, sum the gradients of rows that several ranks hold, before an engine reads them.

The runtime's own synchroniser averages the copies of a whole bucket at a time (see gradient_sync.py). That is too late
for an engine that takes each gradient as soon as it arrives, as DeepSpeed's ZeRO does to partition it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import all_reduce
from meshwright.parallel.row_layout import ShardRecord, record_of


def sum_copies_in_backward(parameters: Iterable[nn.Parameter], tp: Axis) -> None:
    """Sum each partial gradient (see ``ShardRecord.is_grad_partial``) as it arrives, on every rank that holds it.

    This is one all-reduce over tp per parameter and pass. Backward visits the parameters in the same order on
    all ranks of the axis, since they run the same graph.

    Args:
        parameters: trainable parameters with records.
        tp: the axis whose ranks hold the copies.
    """
    for parameter in parameters:
        if record_of(parameter).is_grad_partial:
            _add_hook(parameter, record_of(parameter), tp)


def _add_hook(parameter: nn.Parameter, record: ShardRecord, tp: Axis) -> None:
    parameter.register_hook(lambda grad: sum_copies(grad, record, tp))


def sum_copies(local: Tensor, record: ShardRecord, tp: Axis) -> Tensor:
    """Return ``local`` with each row replaced by the sum over all copies of that row.

    Args:
        local: this rank's part of the gradient, in its shard's shape; half precision is summed in float32.
        record: the parameter's shard record.
        tp: the axis whose ranks hold the rows.
    """
    dtype = torch.promote_types(local.dtype, torch.float32)
    if not record.is_sharded:
        return all_reduce(local.to(dtype, copy=True), tp).to(local.dtype)
    whole = torch.zeros(record.global_shape, dtype=dtype, device=local.device)
    record.layout.add(whole, local.to(dtype), tp.rank)
    return record.layout.take(all_reduce(whole, tp), tp.rank).to(local.dtype)
