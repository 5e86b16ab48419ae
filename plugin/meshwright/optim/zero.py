"""ZeRO: each data-parallel rank keeps the optimizer state of its share of every bucket of parameters.

The user's optimizer object stays; its parameters become this rank's slices. Gradients are
reduce-scattered in buckets during backward, and the optimizer steps the slices. In stages 1 and 2 every
rank holds the parameters whole, and they are all-gathered after the step; in stage 3 a rank keeps its
share of them too (see :mod:`meshwright.optim.units`). Passes under ``no_sync`` and micro-batches leave
whole gradients in stage 1, and reduced shards in stages 2 and 3. Half-precision parameters have float32
master slices and float32 gradients.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import OptimizerMismatchError
from meshwright.parallel.buckets import Bucket, has_gradient, make_buckets
from meshwright.parallel.collectives import Axis, all_gather, all_gather_into, start_reduce_scatter
from meshwright.parallel.guarded import HeldGradient, LocalGradient, is_cleared
from meshwright.parallel.layout import RowLayout, ShardRecord, record_of
from meshwright.parallel.saved import memory


class Weights(Protocol):
    """Where the values of a bucket's parameters are kept, and how a step reaches them."""

    master: Tensor
    """This rank's 1/dp part of the flat bucket, which the optimizer steps."""

    def publish(self) -> None:
        """Have the next forward pass use the stepped values."""

    def refresh(self) -> None:
        """Take over values that were set from outside."""


class WholeWeights:
    """Stages 1 and 2: the parameters live in one flat tensor that every rank holds."""

    def __init__(self, bucket: Bucket, dp: Axis):
        self.bucket, self.dp = bucket, dp
        first = bucket.parameters[0]
        self.flat = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        for parameter, segment in bucket.segments(self.flat):
            segment.copy_(parameter.data)
            parameter.data = segment
        length = bucket.numel // dp.size
        self.own = self.flat[dp.rank * length : (dp.rank + 1) * length]
        self.master = self.own if bucket.dtype == first.dtype else self.own.to(bucket.dtype)

    def publish(self) -> None:
        # Unless somebody moved or cast the parameters, and then no step would reach them.
        storage, _ = memory(self.flat)
        for parameter in self.bucket.parameters:
            if memory(parameter)[0] != storage:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is in other memory than the one that ZeRO steps: "
                    "model.to(...), .float() or the like came after to_distributed (or shard_optimizer); call it before"
                )
        if self.master is not self.own:
            self.own.copy_(self.master)
        all_gather_into(self.flat, self.own, self.dp)

    def refresh(self) -> None:
        if self.master is not self.own:
            self.master.copy_(self.own)


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
    """A bucket of parameters of which this rank steps a 1/dp part.

    Args:
        bucket: its length divides by the size of ``dp``.
        dp: the data-parallel axis.
        weights: of the bucket's parameters.
    """

    def __init__(self, bucket: Bucket, dp: Axis, weights: Weights):
        self.bucket, self.dp, self.weights = bucket, dp, weights
        self.unsynced: Tensor | None = None  # gradients of passes under no_sync, this rank's own
        length = bucket.numel // dp.size
        self.slices = list(self._cut(dp.rank * length, length))

    def _cut(self, start: int, length: int) -> Iterator[Slice]:
        for parameter, offset in zip(self.bucket.parameters, self.bucket.offsets, strict=True):
            low, high = max(start, offset), min(start + length, offset + parameter.numel())
            if low < high:
                in_shard = slice(low - start, high - start)
                shard = nn.Parameter(self.weights.master[in_shard])
                yield Slice(parameter=parameter, start=low - offset, shard=shard, in_shard=in_shard)

    def cut(self, parameter: nn.Parameter) -> RowLayout:
        """Which of a parameter's elements, flattened, each data-parallel rank steps."""
        (offset,) = (o for p, o in zip(self.bucket.parameters, self.bucket.offsets, strict=True) if p is parameter)
        return RowLayout.stretches(offset, parameter.numel(), self.bucket.numel // self.dp.size, self.dp.size)

    def gather_gradients(self) -> Tensor:
        """The reduced gradients of the whole bucket, on every rank."""
        own = torch.zeros_like(self.weights.master)
        for piece in self.slices:
            if piece.shard.grad is not None:
                own[piece.in_shard] = piece.shard.grad
        return all_gather(own, self.dp)


Gradients = dict[int, Tensor]  # by ``id`` of a parameter, or of a slice's shard


class ReduceScatter:
    """The reduction that ZeRO gives GradientSync: gradients go to the slices, ``.grad`` holds a stand-in.

    Args:
        sharded: all buckets.
        dp: the data-parallel axis.
        can_wait: gradients of passes under ``no_sync`` are kept whole (stage 1).

    Attributes:
        groups: the model's parameters of each of the optimizer's groups.
    """

    def __init__(self, sharded: list[ShardedBucket], dp: Axis, *, can_wait: bool):
        self.sharded, self.dp, self.can_wait = sharded, dp, can_wait
        self.groups: list[list[nn.Parameter]] = []
        self._of = {id(s.bucket): s for s in sharded}
        self._slices_of: dict[int, list[Slice]] = {}
        for piece in self.slices:
            self._slices_of.setdefault(id(piece.parameter), []).append(piece)

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all buckets."""
        return (parameter for sharded in self.sharded for parameter in sharded.bucket.parameters)

    @property
    def slices(self) -> Iterator[Slice]:
        """What this rank steps of them."""
        return (piece for sharded in self.sharded for piece in sharded.slices)

    def prepare(self, parameter: nn.Parameter) -> None:
        if is_cleared(parameter.grad):
            self.clear([parameter])
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

    @contextlib.contextmanager
    def aside(self, gradients: Gradients) -> Iterator[None]:
        """Backward passes inside add to ``gradients``, which is empty at first; the model's stay as they are."""
        before = self._exchange(gradients)
        try:
            yield
        finally:
            gradients |= self._exchange(before)

    def add(self, gradients: Gradients, factor: Tensor) -> None:
        """Add gradients from :meth:`aside`, times a number, to the model's; they are used up."""
        self.drop_cleared()
        for parameter in self.parameters:
            if id(parameter) in gradients and parameter.grad is None:
                parameter.grad = HeldGradient.stand_in(parameter)
        for piece in self.slices:
            more = gradients.pop(id(piece.shard), None)
            if more is None:
                continue
            more.mul_(factor)
            if piece.shard.grad is None:
                piece.shard.grad = more
            else:
                piece.shard.grad.add_(more)

    def _exchange(self, gradients: Gradients) -> Gradients:
        """Put these gradients in the place of all that there are; returns those, without their empty places."""
        holders = [*self.parameters, *(piece.shard for piece in self.slices)]
        before = {id(holder): holder.grad for holder in holders if holder.grad is not None}
        for holder in holders:
            holder.grad = gradients.pop(id(holder), None)
        return before

    def clear(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forget every gradient of these parameters, synchronised or not."""
        cleared = {id(p): p for p in parameters}
        for parameter in cleared.values():
            parameter.grad = None
            for piece in self._slices_of.get(id(parameter), []):
                piece.shard.grad = None
        for sharded in self.sharded:
            if sharded.unsynced is not None:
                for member, segment in sharded.bucket.segments(sharded.unsynced):
                    if id(member) in cleared:
                        segment.zero_()
                if all(id(p) in cleared for p in sharded.bucket.parameters):
                    sharded.unsynced = None

    def drop_cleared(self) -> None:
        """Forget the gradients that ``model.zero_grad()`` cleared on the model's parameters."""
        self.clear(parameter for parameter in self.parameters if is_cleared(parameter.grad))


def _stand_in(bucket: Bucket) -> None:
    for parameter in bucket.parameters:
        if has_gradient(parameter):
            parameter.grad = HeldGradient.stand_in(parameter)


def shard_whole_weights(
    groups: Iterable[Iterable[nn.Parameter]], *, dp: Axis, bucket_bytes: int, can_wait: bool
) -> ReduceScatter:
    """Stages 1 and 2: lay parameters that every rank holds into buckets, of each of which it steps a share.

    Args:
        groups: trainable parameters with records, in the order in which backward finishes them; no bucket
            is in two groups.
        dp: the data-parallel axis.
        bucket_bytes: gradients communicate in buckets of this size.
        can_wait: see ReduceScatter.
    """
    buckets = [
        bucket
        for group in groups
        for bucket in make_buckets(group, max_bytes=bucket_bytes, multiple=dp.size, accumulate_in_float32=True)
    ]
    return ReduceScatter([ShardedBucket(b, dp, WholeWeights(b, dp)) for b in buckets], dp, can_wait=can_wait)


def shard_optimizer_state(optimizer: Optimizer, reduction: ReduceScatter) -> None:
    """Turn the optimizer's parameters into this rank's slices, with the state they already have.

    Args:
        optimizer: bound to parameters of the reduction; changed in place.
        reduction: what it is to step.
    """
    reduction.groups = [list(group["params"]) for group in optimizer.param_groups]
    stepped: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        trainable = {id(p): p for p in group["params"] if p.requires_grad}
        slices = [piece for piece in reduction.slices if id(piece.parameter) in trainable]
        for piece in slices:
            if piece.parameter in optimizer.state:
                optimizer.state[piece.shard] = {
                    key: _slice_state(value, piece) for key, value in optimizer.state[piece.parameter].items()
                }
        for parameter in trainable.values():
            optimizer.state.pop(parameter, None)
        group["params"] = [piece.shard for piece in slices]
        stepped += trainable.values()
    _hook_optimizer(optimizer, reduction, stepped)


def _slice_state(value: Any, piece: Slice) -> Any:
    if torch.is_tensor(value) and value.shape == piece.parameter.shape and value.ndim:
        part = value.flatten()[piece.start : piece.start + piece.shard.numel()]
        return part.to(piece.shard.dtype).clone()
    return value.clone() if torch.is_tensor(value) else value


def _hook_optimizer(optimizer: Optimizer, reduction: ReduceScatter, stepped: list[nn.Parameter]) -> None:
    optimizer.register_step_pre_hook(lambda *_: reduction.drop_cleared())

    def publish(*_: Any) -> None:
        for sharded in reduction.sharded:
            sharded.weights.publish()

    optimizer.register_step_post_hook(publish)

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        reduction.clear(stepped)

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
