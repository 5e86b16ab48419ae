"""ZeRO stage 1: each data-parallel rank keeps the optimizer state of its share of every bucket.

The user's optimizer object stays; its parameters become this rank's slices. Per step: gradients are
reduce-scattered in buckets during backward, the optimizer steps the slices, and the parameters are
all-gathered. Half-precision parameters have float32 master slices and float32 gradients.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import OptimizerMismatchError
from meshwright.parallel.buckets import Bucket, has_gradient, make_buckets
from meshwright.parallel.collectives import Axis, all_gather, all_gather_into, start_reduce_scatter
from meshwright.parallel.guarded import HeldGradient, LocalGradient, is_cleared
from meshwright.parallel.layout import RowLayout, ShardRecord, record_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Slice:
    """The part of one parameter's elements that this rank steps.

    Args:
        parameter: the model's (TP-sharded) parameter.
        start: first element of it, in its flattened order.
        shard: the optimizer's parameter, a 1-d view into the bucket's master shard.
        in_shard: position in that shard.
    """

    parameter: nn.Parameter
    start: int
    shard: nn.Parameter
    in_shard: slice


class ShardedBucket:
    """A bucket whose parameters live in one flat tensor, of which this rank steps a 1/dp part."""

    def __init__(self, bucket: Bucket, dp: Axis):
        self.bucket, self.dp = bucket, dp
        self.unsynced: Tensor | None = None  # gradients of passes under no_sync, this rank's own
        first = bucket.parameters[0]
        self.flat = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        for parameter, segment in bucket.segments(self.flat):
            segment.copy_(parameter.data)
            parameter.data = segment
        length = bucket.numel // dp.size
        self.own = self.flat[dp.rank * length : (dp.rank + 1) * length]
        self.master = self.own if bucket.dtype == first.dtype else self.own.to(bucket.dtype)
        self.slices = list(self._cut(dp.rank * length, length))

    def _cut(self, start: int, length: int) -> Any:
        for parameter, offset in zip(self.bucket.parameters, self.bucket.offsets, strict=True):
            low, high = max(start, offset), min(start + length, offset + parameter.numel())
            if low < high:
                in_shard = slice(low - start, high - start)
                shard = nn.Parameter(self.master[in_shard])
                yield Slice(parameter=parameter, start=low - offset, shard=shard, in_shard=in_shard)

    def cut(self, parameter: nn.Parameter) -> RowLayout:
        """Which of a parameter's elements, flattened, each data-parallel rank steps."""
        (offset,) = (o for p, o in zip(self.bucket.parameters, self.bucket.offsets, strict=True) if p is parameter)
        size, length = parameter.numel(), self.bucket.numel // self.dp.size
        borders = [min(max(rank * length - offset, 0), size) for rank in range(self.dp.size + 1)]
        return RowLayout(0, size, tuple((span,) for span in pairwise(borders)))

    def publish(self) -> None:
        """Give every rank the stepped parameters."""
        if self.master is not self.own:
            self.own.copy_(self.master)
        all_gather_into(self.flat, self.own, self.dp)

    def refresh_master(self) -> None:
        """Take the parameters' values over, where they were set from outside."""
        if self.master is not self.own:
            self.master.copy_(self.own)

    def gather_gradients(self) -> Tensor:
        """The reduced gradients of the whole bucket, on every rank."""
        own = torch.zeros_like(self.master)
        for piece in self.slices:
            if piece.shard.grad is not None:
                own[piece.in_shard] = piece.shard.grad
        return all_gather(own, self.dp)


class ReduceScatter:
    """The reduction that ZeRO gives GradientSync: gradients go to the slices, ``.grad`` holds a stand-in.

    Args:
        sharded: the buckets.
        dp: the axis over which they are cut.
        groups: the model's parameters of each of the optimizer's groups.
    """

    def __init__(self, sharded: list[ShardedBucket], dp: Axis, groups: list[list[nn.Parameter]]):
        self.sharded = sharded
        self.dp = dp
        self.groups = groups
        self._of = {id(s.bucket): s for s in sharded}
        self._slices_of: dict[int, list[Slice]] = {}
        for bucket in sharded:
            for piece in bucket.slices:
                self._slices_of.setdefault(id(piece.parameter), []).append(piece)

    def prepare(self, parameter: nn.Parameter) -> None:
        if is_cleared(parameter.grad):
            self._forget(parameter)
        parameter.grad = None  # autograd must not add into the stand-in

    def hold(self, bucket: Bucket) -> None:
        sharded = self._of[id(bucket)]
        if any(has_gradient(p) for p in bucket.parameters):
            flat = bucket.flatten_gradients(1 / self.dp.size)
            sharded.unsynced = flat if sharded.unsynced is None else sharded.unsynced.add_(flat)
            _stand_in(bucket)

    def holds(self, bucket: Bucket) -> bool:
        return self._of[id(bucket)].unsynced is not None

    def take(self, bucket: Bucket) -> Tensor:
        sharded = self._of[id(bucket)]
        flat = bucket.flatten_gradients(1 / self.dp.size)
        if sharded.unsynced is not None:
            flat.add_(sharded.unsynced)
            sharded.unsynced = None
        return flat

    def start(self, bucket: Bucket, flat: Tensor) -> Callable[[], None]:
        sharded = self._of[id(bucket)]
        wait = start_reduce_scatter(flat, self.dp)
        _stand_in(bucket)

        def finish() -> None:
            own = wait()
            for piece in sharded.slices:
                gradient = own[piece.in_shard]
                # No rank had a gradient: leave None, so that the optimizer skips it as on one device.
                if piece.parameter.grad is None:
                    if not gradient.any():
                        continue
                    piece.parameter.grad = HeldGradient.stand_in(piece.parameter)  # another rank had one
                if piece.shard.grad is None:
                    piece.shard.grad = gradient.as_subclass(LocalGradient)
                else:
                    piece.shard.grad.add_(gradient)

        return finish

    def clear(self) -> None:
        """Forget every gradient, synchronised or not."""
        for sharded in self.sharded:
            sharded.unsynced = None
            for parameter in sharded.bucket.parameters:
                parameter.grad = None
            for piece in sharded.slices:
                piece.shard.grad = None

    def drop_cleared(self) -> None:
        """Forget the gradients that ``model.zero_grad()`` cleared on the model's parameters."""
        for sharded in self.sharded:
            for parameter in sharded.bucket.parameters:
                if is_cleared(parameter.grad):
                    self._forget(parameter)

    def _forget(self, parameter: nn.Parameter) -> None:
        for piece in self._slices(parameter):
            piece.shard.grad = None
        for sharded in self.sharded:
            if sharded.unsynced is not None:
                for member, segment in sharded.bucket.segments(sharded.unsynced):
                    if member is parameter:
                        segment.zero_()

    def _slices(self, parameter: nn.Parameter) -> list[Slice]:
        return self._slices_of.get(id(parameter), [])


def _stand_in(bucket: Bucket) -> None:
    for parameter in bucket.parameters:
        if has_gradient(parameter):
            parameter.grad = HeldGradient.stand_in(parameter)


def shard_optimizer_state(optimizer: Optimizer, *, dp: Axis, bucket_bytes: int) -> ReduceScatter:
    """Turn the optimizer's parameters into this rank's slices, with the state they already have.

    Args:
        optimizer: bound to parameters that carry a record; changed in place.
        dp: the data-parallel axis.
        bucket_bytes: gradients communicate in buckets of this size.
    """
    sharded: list[ShardedBucket] = []
    groups = [list(group["params"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        trainable = [p for p in group["params"] if p.requires_grad]
        buckets = make_buckets(
            reversed(trainable), max_bytes=bucket_bytes, multiple=dp.size, accumulate_in_float32=True
        )
        own = [ShardedBucket(bucket, dp) for bucket in buckets]
        for piece in (piece for bucket in own for piece in bucket.slices):
            if piece.parameter in optimizer.state:
                optimizer.state[piece.shard] = {
                    key: _slice_state(value, piece) for key, value in optimizer.state[piece.parameter].items()
                }
        for parameter in trainable:
            optimizer.state.pop(parameter, None)
        group["params"] = [piece.shard for bucket in own for piece in bucket.slices]
        sharded += own
    reduction = ReduceScatter(sharded, dp, groups)
    _hook_optimizer(optimizer, reduction)
    return reduction


def _slice_state(value: Any, piece: Slice) -> Any:
    if torch.is_tensor(value) and value.shape == piece.parameter.shape and value.ndim:
        part = value.flatten()[piece.start : piece.start + piece.shard.numel()]
        return part.to(piece.shard.dtype).clone()
    return value.clone() if torch.is_tensor(value) else value


def _hook_optimizer(optimizer: Optimizer, reduction: ReduceScatter) -> None:
    optimizer.register_step_pre_hook(lambda *_: reduction.drop_cleared())

    def publish(*_: Any) -> None:
        for bucket in reduction.sharded:
            bucket.publish()

    optimizer.register_step_post_hook(publish)

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        reduction.clear()

    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        raise OptimizerMismatchError("parameters cannot be added to a sharded optimizer; add them before the call")

    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
    optimizer.add_param_group = types.MethodType(add_param_group, optimizer)  # type: ignore[method-assign]


def slice_copies(piece: Slice) -> Tensor | float:
    """How many copies over the TP axis each element of a slice has."""
    record: ShardRecord = record_of(piece.parameter)
    copies = record.copies(piece.shard)
    if isinstance(copies, float):
        return copies
    return copies.expand(piece.parameter.shape).flatten()[piece.start : piece.start + piece.shard.numel()]
