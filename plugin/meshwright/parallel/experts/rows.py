"""Copies rows of a matrix, and adds rows up, with the same sums in each run.

``x[index]`` of torch gives the same bits in each run, but takes five times as long on CPU as ``index_select``, whose
backward adds in any order on CUDA.
"""

from __future__ import annotations

from torch import Tensor

from meshwright.autograd import Node, TensorFunction
from meshwright.parallel.collectives import once_differentiable


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows of ``x`` that ``index`` names; backward adds their gradients up."""
    return _TakeRows.apply(x, index)


def add_rows(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Return ``count`` rows, each of which is the sum of the rows of ``x`` for which ``index`` names it."""
    return _Add.apply(x, index, count)


def _add(x: Tensor, index: Tensor, count: int) -> Tensor:
    out = x.new_zeros((count, *x.shape[1:]))
    if x.device.type == "cpu":
        return out.index_add_(0, index, x)
    return out.index_put_((index,), x, accumulate=True)  # sorts, where index_add_ adds in any order


class _TakeRows(TensorFunction):
    @staticmethod
    def forward(ctx: Node, x: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.count = index, len(x)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Node, grad: Tensor) -> tuple[Tensor, None]:
        return _add(grad, ctx.index, ctx.count), None


class _Add(TensorFunction):
    @staticmethod
    def forward(ctx: Node, x: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.index = index
        return _add(x, index, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Node, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.index), None, None
