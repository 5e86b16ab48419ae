"""Collectives over one mesh axis, and their differentiable forms.

Each differentiable function is named after its forward. Its docstring also describes its backward, since backward is
where tensor parallelism goes wrong. A tensor's rows are along dim 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from meshwright.autograd import Node, TensorFunction
from meshwright.faults.interpose import own_collectives
from meshwright.mesh.axes import Axis
from meshwright.mesh.process_group import wire_device

# torch 2.13 renamed these methods of a process group: its old names warn, and older versions lack the new names.
_IS_RENAMED = hasattr(ProcessGroup, "all_gather_single")
_ALL_GATHER = "all_gather_single" if _IS_RENAMED else "_allgather_base"
_REDUCE_SCATTER = "reduce_scatter_single" if _IS_RENAMED else "_reduce_scatter_base"
_ALL_TO_ALL = "all_to_all_single" if _IS_RENAMED else "alltoall_base"

# gloo gathers into a new tensor of the result's size, and copies the result from there. A broadcast from each rank
# moves the same bytes straight to their place (2 ranks, 64 MiB: 31 ms against 105 ms; 4 MiB: 2.8 ms against 5.0 ms).
# If each rank has less than this, the calls cost more than the copy.
GLOO_BROADCASTS_FROM = 1 << 19  # bytes


Operation = Callable[[Tensor, Axis], Tensor]


class _Work(Protocol):
    """A collective that has started."""

    def wait(self) -> object: ...


# The next functions call a process group as those of torch.distributed do, without the checks of the arguments, which
# take longer than the call and hold here.
def _start(axis: Axis, name: str, *arguments: object) -> _Work:
    work: _Work = getattr(axis.group, name)(*arguments)
    return work


def _all_gather(out: Tensor, x: Tensor, axis: Axis, *, is_async: bool = False) -> _Work:
    if x.nbytes >= GLOO_BROADCASTS_FROM and axis.group is not None and _is_gloo(axis.group, out.device):
        return _broadcast_parts(_real(out), _real(x), axis.group)
    return _start(axis, _ALL_GATHER, _real(out), _real(x), _options(AllgatherOptions, is_async))


def _is_gloo(group: ProcessGroup, device: torch.device) -> bool:
    return device.type == "cpu" and type(group._get_backend(device)).__name__ == "ProcessGroupGloo"


def _broadcast_parts(out: Tensor, x: Tensor, group: ProcessGroup) -> _Works:
    parts = out.chunk(group.size())
    own = parts[group.rank()]
    if own.data_ptr() != x.data_ptr():
        own.copy_(x.detach())
    return _Works([group.broadcast([part], _broadcast_from(rank)) for rank, part in enumerate(parts)])


@functools.cache
def _broadcast_from(rank: int) -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank = rank
    return options


class _Works:
    """Several collectives that are waited for as one."""

    def __init__(self, works: list[_Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _reduce_scatter(out: Tensor, x: Tensor, axis: Axis, *, is_async: bool = False) -> _Work:
    return _start(axis, _REDUCE_SCATTER, _real(out), _real(x), _options(ReduceScatterOptions, is_async))


def _all_to_all(
    out: Tensor,
    x: Tensor,
    axis: Axis,
    received: Sequence[int] = (),
    sent: Sequence[int] = (),
    *,
    is_async: bool = False,
) -> _Work:
    sizes = list(received), list(sent)  # empty ones stand for equal parts
    return _start(axis, _ALL_TO_ALL, _real(out), _real(x), *sizes, _options(AllToAllOptions, is_async))


def _all_reduce(x: Tensor, axis: Axis, *, is_async: bool = False) -> _Work:
    return _start(axis, "allreduce", [_real(x)], _options(AllreduceOptions, is_async))


@functools.cache
def _options(kind: Callable[[], Any], is_async: bool) -> Any:
    options = kind()
    options.asyncOp = is_async
    return options


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x  # no backend has complex numbers


def _end(work: _Work | None) -> None:
    if work is not None:  # NCCL has put it in the current stream
        work.wait()


@own_collectives()
def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Return the rows of every rank of the axis, in rank order."""
    if axis.size == 1:
        return x
    out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    _end(_all_gather(out, x.contiguous(), axis))
    return out


@own_collectives()
def start_all_gather(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Start an all-gather of rows; the returned function waits for it and returns its result."""
    if axis.size == 1:
        return lambda: x
    out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    work = _all_gather(out, x.contiguous(), axis, is_async=True)
    return lambda: _wait(work, out)


@own_collectives()
def all_gather_into(out: Tensor, x: Tensor, axis: Axis) -> None:
    """Fill ``out`` with the rows of every rank; ``x`` may be this rank's part of ``out`` itself."""
    if axis.size > 1:
        _end(_all_gather(out, x, axis))


@own_collectives()
def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Sum ``x`` over the axis and return this rank's equal share of the rows."""
    if axis.size == 1 or x.device.type == "cpu":
        return _start_reduce_scatter(x, axis)()
    assert x.shape[0] % axis.size == 0
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    _end(_reduce_scatter(out, x.contiguous(), axis))
    return out


@own_collectives()
def start_reduce_scatter(x: Tensor, axis: Axis, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    """Start a reduce-scatter; the returned function waits for it and returns its result.

    Args:
        x: the rows to sum, which travel in their own dtype.
        axis: the axis over which they are summed.
        dtype: the dtype of the result (default: that of ``x``). On CPU the sum is computed in this dtype; NCCL adds in
            the dtype of ``x``.
    """
    return _start_reduce_scatter(x, axis, dtype)


def _start_reduce_scatter(x: Tensor, axis: Axis, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    dtype = x.dtype if dtype is None else dtype
    if axis.size == 1:
        return lambda: x.to(dtype)
    assert x.shape[0] % axis.size == 0
    x = x.contiguous()
    shape = (x.shape[0] // axis.size, *x.shape[1:])
    if x.device.type != "cpu":
        out = x.new_empty(shape)
        work = _reduce_scatter(out, x, axis, is_async=True)
        return lambda: _wait(work, out).to(dtype)
    # gloo's reduce-scatter is a full all-reduce and a copy, with twice the bytes and four times the time
    # (2 ranks, 4 MiB: 6.6 ms against 1.6 ms). An all-to-all moves only the rows that each rank needs.
    parts = torch.empty_like(x)
    work = _all_to_all(parts, x, axis, is_async=True)
    return lambda: _sum_of_parts(_wait(work, parts).view(axis.size, *shape), dtype)


def _sum_of_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    if len(parts) == 2 and dtype == parts.dtype:
        return torch.add(*parts)  # torch.sum would first fill its result with zeros
    return torch.sum(parts, 0, dtype=dtype)


@own_collectives()
def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Send row i of ``x`` to rank i of the axis, and return the rows that the ranks sent to this one, in rank order."""
    assert x.shape[0] == axis.size
    if axis.size == 1:
        return x
    x = x.contiguous()
    out = torch.empty_like(x)
    _end(_all_to_all(out, x, axis))
    return out


@own_collectives()
def start_all_to_all_uneven(x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Callable[[], Tensor]:
    """Start to send ``sent[i]`` rows of ``x`` to each rank i in turn.

    The returned function waits for it and returns the ``received[i]`` rows from each rank, in rank order.
    """
    out = x.new_empty((sum(received), *x.shape[1:]))
    work = _all_to_all(out, x.contiguous(), axis, received, sent, is_async=True)
    return lambda: _wait(work, out)


@own_collectives()
def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum ``x`` over the axis, in place."""
    if axis.size > 1:
        _end(_all_reduce(x, axis))
    return x


@own_collectives()
def start_all_reduce(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Start an all-reduce in place; the returned function waits for it and returns ``x``."""
    if axis.size == 1:
        return lambda: x
    work = _all_reduce(x, axis, is_async=True)
    return lambda: _wait(work, x)


@own_collectives()
def maximum(x: Tensor, axis: Axis) -> Tensor:
    """Take the maximum of each element of ``x`` over the axis, in place."""
    if axis.size > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=axis.group)
    return x


def largest(number: int, axis: Axis) -> int:
    """Return the largest of the numbers that the ranks of the axis pass. Over gloo, it waits for no device."""
    if axis.size == 1:
        return number
    found = int(maximum(torch.tensor(number, device=wire_device(group=axis.group)), axis))
    return max(number, found)  # a traced step continues with a value that no rank has passed


def agree(x: Tensor, *axes: Axis) -> Tensor:
    """Return, on every rank, the ``x`` of the rank whose coordinate is 0 on all of ``axes``."""
    for axis in axes:
        x = all_gather(x[None], axis)[0]
    return x


def _wait(work: _Work, result: Tensor) -> Tensor:
    work.wait()
    return result


class _Collective(TensorFunction):
    """Runs one operation in forward and its counterpart in backward."""

    is_linear = True

    @staticmethod
    def forward(ctx: Node, x: Tensor, axis: Axis, run: Operation, run_backward: Operation) -> Tensor:
        ctx.axis, ctx.run_backward = axis, run_backward
        return run(x, axis)

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.run_backward(grad, ctx.axis), None, None, None


def _own_rows(x: Tensor, axis: Axis) -> Tensor:
    # A copy, since a view would keep the whole tensor alive as long as the shard.
    return x.chunk(axis.size)[axis.rank].clone()


def _sum(x: Tensor, axis: Axis) -> Tensor:
    # A copy, since the reduction is in place and autograd may pass the same tensor to another consumer.
    return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _of_first(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.rank == 0 else torch.zeros_like(x)


def gather_rows(x: Tensor, axis: Axis) -> Tensor:
    """Gather all rows for a sharded consumer; backward sums the partial gradients and keeps this rank's rows."""
    return _Collective.apply(x, axis, all_gather, reduce_scatter)


def reduce_scatter_rows(x: Tensor, axis: Axis) -> Tensor:
    """Sum partial results and keep this rank's rows; backward gathers the gradients of all rows."""
    return _Collective.apply(x, axis, reduce_scatter, all_gather)


def split_rows(x: Tensor, axis: Axis) -> Tensor:
    """Keep this rank's rows of a replicated tensor; backward gathers the gradients of all rows."""
    return _Collective.apply(x, axis, _own_rows, all_gather)


def unsplit_rows(x: Tensor, axis: Axis) -> Tensor:
    """Gather all rows for a replicated consumer; backward keeps this rank's rows of the replicated gradient."""
    return _Collective.apply(x, axis, all_gather, _own_rows)


def exchange_rows(x: Tensor, axis: Axis) -> Tensor:
    """Send row i of ``x`` to rank i, as :func:`all_to_all`; backward sends the gradients back."""
    return _Collective.apply(x, axis, all_to_all, all_to_all)


def share(x: Tensor, axis: Axis) -> Tensor:
    """Pass a replicated tensor to sharded consumers; backward sums the consumers' partial gradients."""
    return _Collective.apply(x, axis, _same, _sum) if axis.size > 1 else x


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum partial results for a replicated consumer; backward passes the gradient through unchanged."""
    return _Collective.apply(x, axis, _sum, _same) if axis.size > 1 else x


def count_once(x: Tensor, axis: Axis) -> Tensor:
    """Pass what every rank computed to a replicated consumer; backward keeps the gradient on the first rank alone."""
    return _Collective.apply(x, axis, _same, _of_first) if axis.size > 1 else x


def reduce_for_shards(x: Tensor, axis: Axis) -> Tensor:
    """Sum partial results for sharded consumers; backward sums the consumers' partial gradients."""
    return _Collective.apply(x, axis, _sum, _sum) if axis.size > 1 else x
