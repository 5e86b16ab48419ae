"""While backward runs, sum the gradients of rows that several ranks hold, before an engine reads them.

The runtime's own synchroniser averages the copies of a whole bucket at a time (see gradient_sync.py). That is too late
for an engine that takes each gradient as soon as it arrives, as DeepSpeed's ZeRO does to partition it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.autograd import refuse_second_order
from meshwright.layout.tensor_layout import TensorLayout, layout_of
from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import all_reduce


def sum_copies_in_backward(parameters: Iterable[nn.Parameter], tp: Axis) -> None:
    """Sum each partial gradient (see ``TensorLayout.addends``) as it arrives, on every rank that holds it.

    This is one all-reduce over tp per parameter and pass. Backward visits the parameters in the same order on
    all ranks of the axis, since they run the same graph.

    Args:
        parameters: trainable parameters with layouts.
        tp: the axis whose ranks hold the copies.
    """
    for parameter in parameters:
        if layout_of(parameter).has_addends:
            parameter.register_hook(partial(sum_copies, layout=layout_of(parameter), tp=tp))


def sum_copies(local: Tensor, layout: TensorLayout, tp: Axis) -> Tensor:
    """Return ``local`` with each row replaced by the sum over all copies of that row.

    Args:
        local: this rank's part of the gradient, in its shard's shape; half precision is summed in float32.
        layout: the parameter's layout.
        tp: the axis whose ranks hold the rows.
    """
    refuse_second_order("Write loss.backward(), or use a plan of one process")
    dtype = torch.promote_types(local.dtype, torch.float32)
    if not layout.is_sharded:
        return all_reduce(local.to(dtype, copy=True), tp).to(local.dtype)
    whole = torch.zeros(layout.shape, dtype=dtype, device=local.device)
    layout.add(whole, local.to(dtype))
    return layout.take(all_reduce(whole, tp)).to(local.dtype)
