"""Whole tensors out of shards: one-device names and shapes, on rank 0."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.faults.interpose import own_collectives
from meshwright.optim.runtime import Runtime, find_runtime, runtime_of
from meshwright.parallel.collectives import Axis, maximum
from meshwright.parallel.layout import RowLayout, ShardRecord, Span, record_of


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The one-device state dict of a distributed model, on the CPU of rank 0; empty elsewhere.

    A collective call: every rank makes it. A tied weight appears under each of its names. The dict
    holds the whole model in rank 0's memory; ``model.save_pretrained`` writes it without.

    Example::

        weights = mw.full_state_dict(model)
        if dist.get_rank() == 0:
            torch.save(weights, "model.pt")
    """
    runtime = find_runtime(model)
    state = model.state_dict(keep_vars=True)
    if runtime is None:
        return {name: value.detach().cpu().clone() for name, value in state.items()}
    full: dict[str, Tensor] = {}
    done: dict[int, Tensor | None] = {}
    for name, value in state.items():
        if id(value) not in done:
            whole = gather_full(value, runtime)
            # A tensor that is not sharded is the model's own: the user gets a copy.
            done[id(value)] = whole.cpu().clone() if whole is not None and whole.shape == value.shape else whole
        if (whole := done[id(value)]) is not None:
            full[name] = whole
    return full


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The one-device gradients of a distributed model, on the CPU of rank 0; empty elsewhere.

    A collective call: every rank makes it. Parameters without a gradient are left out; a tied one
    appears under its first name.

    Raises:
        ValueError: if the model is not distributed, or the last backward pass ran under ``no_sync``.
    """
    runtime = runtime_of(model)
    runtime.check_synced()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    full: dict[str, Tensor] = {}
    for parameter, local in _local_gradients(runtime):
        whole = _assemble(local, record_of(parameter), runtime)
        if whole is not None:
            full[names[id(parameter)]] = whole.cpu().clone() if whole.shape == local.shape else whole
    return {name: full[name] for name in names.values() if name in full}


def _local_gradients(runtime: Runtime) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The gradients of this rank's TP shards, on every data-parallel rank; those of one bucket at a time."""
    sharded_ones: set[int] = set()
    if runtime.zero is not None:
        runtime.zero.drop_cleared()
        sharded_ones = {id(parameter) for parameter in runtime.zero.parameters}
        for sharded in runtime.zero.sharded:
            for parameter, gradient in sharded.bucket.segments(sharded.gather_gradients()):
                if _has_any(parameter, runtime):
                    yield parameter, gradient
    for parameter in runtime.parameters:
        if id(parameter) not in sharded_ones and parameter.grad is not None:
            yield parameter, parameter.grad.as_subclass(Tensor)


def _has_any(parameter: nn.Parameter, runtime: Runtime) -> bool:
    """Whether some data-parallel rank has a gradient of a parameter."""
    return bool(maximum(torch.tensor(float(parameter.grad is not None), device=parameter.device), runtime.dp))


def gather_full(value: Tensor, runtime: Runtime) -> Tensor | None:
    """The whole of a distributed model's parameter or buffer on rank 0, None elsewhere; every rank calls it.

    On the CPU, and in memory of its own, if it is sharded; else the tensor itself.
    """
    if isinstance(value, nn.Parameter):
        local = value.detach() if runtime.weights is None else runtime.weights.collect(value)
        return _assemble(local, record_of(value), runtime)
    return value.detach() if is_first(runtime) else None


def is_first(runtime: Runtime) -> bool:
    """Whether this is the rank that gets whole tensors."""
    return runtime.tp.rank == 0 and runtime.dp.rank == 0


_CHUNK = 4 * 2**20  # bytes in flight: rank 0 holds so much beside the full tensor


def _assemble(local: Tensor | None, record: ShardRecord, runtime: Runtime) -> Tensor | None:
    """The whole tensor on rank 0; None on the others, of which those of other data-parallel rows wait for nobody."""
    tp, layout = runtime.tp, record.layout
    if not record.is_sharded:
        return local if is_first(runtime) else None
    if runtime.dp.rank != 0:
        return None
    assert local is not None, "the first data-parallel ranks hold something of every parameter"
    full = torch.empty(record.global_shape, dtype=local.dtype) if tp.rank == 0 else None
    for owner, start, offset, count in _pieces(layout, max(1, _CHUNK * layout.local_size // max(local.nbytes, 1))):
        if tp.rank == owner:
            piece = local.narrow(layout.dim, offset, count)
            if owner != 0:
                _send(piece, tp)
        elif tp.rank == 0:
            shape = list(local.shape)
            shape[layout.dim] = count
            piece = _receive(local.new_empty(shape), owner, tp)
        if full is not None:
            full.narrow(layout.dim, start, count).copy_(piece)
    return full


def _pieces(layout: RowLayout, most: int) -> Iterator[tuple[int, int, int, int]]:
    """(rank, first row of the full tensor, first row of the rank's shard, rows), at most so many at a time.

    Rows that several ranks hold come from the first of them.
    """
    covered: set[Span] = set()
    for rank, spans in enumerate(layout.spans):
        offset = 0
        for start, stop in spans:
            if (start, stop) not in covered:
                for row in range(start, stop, most):
                    yield rank, row, offset + row - start, min(most, stop - row)
            covered.add((start, stop))
            offset += stop - start


@own_collectives()
def _send(piece: Tensor, tp: Axis) -> None:
    dist.send(piece.contiguous(), _global_rank(tp, 0), group=tp.group)


@own_collectives()
def _receive(piece: Tensor, owner: int, tp: Axis) -> Tensor:
    dist.recv(piece, _global_rank(tp, owner), group=tp.group)
    return piece


def _global_rank(axis: Axis, rank: int) -> int:
    assert axis.group is not None
    return dist.get_global_rank(axis.group, rank)
