"""ZeRO: each data-parallel rank keeps the optimizer state of its share of every bucket of parameters.

The user's optimizer object stays; its parameters become this rank's slices. Gradients are
reduce-scattered in buckets during backward, and the optimizer steps the slices. In stages 1 and 2 every
rank holds the parameters whole, and they are all-gathered after the step; in stage 3 a rank keeps its
share of them too (see :mod:`meshwright.optim.zero3_layers`). Passes under ``no_sync`` and micro-batches leave
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
from meshwright.optim.whole_weights import WholeWeights
from meshwright.parallel.collectives import Axis, all_gather, start_reduce_scatter
from meshwright.parallel.gradient_buckets import Bucket, has_gradient, make_buckets
from meshwright.parallel.row_layout import RowLayout, ShardRecord, record_of
from meshwright.parallel.sharded_parameter import LocalGradient
from meshwright.parallel.tensor_guards import HeldGradient, is_cleared, is_stand_in


class Weights(Protocol):
    """Where the values of a bucket's parameters are kept, and how a step reaches them."""

    master: Tensor
    """This rank's 1/dp part of the flat bucket, which the optimizer steps."""

    def publish(self) -> None:
        """Have the next forward pass use the stepped values."""

    def refresh(self) -> None:
        """Take over values that were set from outside."""

    def take_over(self) -> None:
        """Before a step: take over what the program wrote into the parameters, if anything."""


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
            low, high = max(start, offset), min(start + length, offset + parameter.shape.numel())
            if low < high:
                in_shard = slice(low - start, high - start)
                shard = nn.Parameter(self.weights.master[in_shard])
                yield Slice(parameter=parameter, start=low - offset, shard=shard, in_shard=in_shard)

    def cut(self, parameter: nn.Parameter) -> RowLayout:
        """Which of a parameter's elements, flattened, each data-parallel rank steps."""
        (offset,) = (o for p, o in zip(self.bucket.parameters, self.bucket.offsets, strict=True) if p is parameter)
        return RowLayout.stretches(offset, parameter.shape.numel(), self.bucket.numel // self.dp.size, self.dp.size)

    def gather_gradients(self) -> Tensor:
        """The reduced gradients of the whole bucket, on every rank."""
        own = torch.zeros_like(self.weights.master)
        for piece in self.slices:
            if piece.shard.grad is not None:
                own[piece.in_shard] = piece.shard.grad.as_subclass(Tensor)
        return all_gather(own, self.dp)


Gradients = dict[int, Tensor]  # by ``id`` of a parameter, or of a slice's shard


class ReduceScatter:
    """The reduction that ZeRO gives GradientSync: gradients go to the slices, ``.grad`` holds a stand-in.

    Args:
        dp: the data-parallel axis.
        can_wait: gradients of passes under ``no_sync`` are kept whole (stage 1).

    Attributes:
        sharded: all buckets.
        groups: the model's parameters of each of the optimizer's groups, frozen ones too.
    """

    def __init__(self, dp: Axis, *, can_wait: bool):
        self.sharded: list[ShardedBucket] = []
        self.dp, self.can_wait = dp, can_wait
        self.groups: list[list[nn.Parameter]] = []
        self._of: dict[int, ShardedBucket] = {}
        self._with: dict[int, ShardedBucket] = {}
        self._slices_of: dict[int, list[Slice]] = {}
        self._arrived: set[int] = set()  # parameters whose gradients of the pass under way are in their ``.grad``

    def extend(self, sharded: list[ShardedBucket]) -> None:
        """Reduce these buckets too."""
        self.sharded += sharded
        for one in sharded:
            self._of[id(one.bucket)] = one
            self._with |= {id(p): one for p in one.bucket.parameters}
            for piece in one.slices:
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
        if not has_gradient(parameter):
            self._forget([parameter])
            parameter.grad = None  # autograd must not add into the stand-in
        elif id(parameter) not in self._arrived:  # set by the program: this pass adds to it
            gradient = parameter.grad
            self.clear([parameter])
            parameter.grad = gradient
        self._arrived.add(id(parameter))

    def hold(self, bucket: Bucket) -> None:
        sharded = self._of[id(bucket)]
        if any(has_gradient(p) for p in bucket.parameters):
            flat = bucket.flatten_gradients(1 / self.dp.size)
            sharded.unsynced = flat if sharded.unsynced is None else sharded.unsynced.add_(flat)
            self._stand_in(bucket)

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
        self._forget(p for p in bucket.parameters if not has_gradient(p))  # cleared, and used by another rank perhaps
        self._stand_in(bucket)

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
                    piece.shard.grad = LocalGradient.of(gradient)
                else:
                    piece.shard.grad.as_subclass(Tensor).add_(gradient)

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
        self.settle()
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
                piece.shard.grad.as_subclass(Tensor).add_(more.as_subclass(Tensor))

    def _exchange(self, gradients: Gradients) -> Gradients:
        """Put these gradients in the place of all that there are; returns those, without their empty places."""
        holders = [*self.parameters, *(piece.shard for piece in self.slices)]
        before = {id(holder): holder.grad for holder in holders if holder.grad is not None}
        for holder in holders:
            holder.grad = gradients.pop(id(holder), None)
        return before

    def clear(self, parameters: Iterable[nn.Parameter], *, set_to_none: bool = True) -> None:
        """Forget every gradient of these parameters, synchronised or not; or make those that there are zero."""
        cleared = {id(p): p for p in parameters}
        for parameter in cleared.values():
            shards = [piece.shard for piece in self._slices_of.get(id(parameter), [])]
            if set_to_none:
                for holder in (parameter, *shards):
                    holder.grad = None
            elif parameter.grad is not None:
                for holder in (parameter, *shards):
                    if holder.grad is not None:
                        holder.grad.zero_()
                HeldGradient.restore(parameter.grad)
        for sharded in {id(s): s for key in cleared if (s := self._with.get(key)) is not None}.values():
            if sharded.unsynced is not None:
                for member, segment in sharded.bucket.segments(sharded.unsynced):
                    if id(member) in cleared:
                        segment.zero_()
                if all(id(p) in cleared for p in sharded.bucket.parameters):
                    sharded.unsynced = None

    def settle(self) -> None:
        """Do with the gradients in the slices what the program did with those of the model: cleared or set them.

        A gradient that the program set is averaged over the axis. Where all ranks set the same it stays the same.
        """
        self._forget(self.parameters)
        for sharded in self.sharded:
            if not any(map(has_gradient, sharded.bucket.parameters)):
                continue
            given = [p for p in sharded.bucket.parameters if has_gradient(p)]
            for parameter in given:
                assert parameter.grad is not None
                record_of(parameter).zero_padding(parameter.grad.as_subclass(Tensor))
            own = start_reduce_scatter(sharded.bucket.flatten_gradients(1 / self.dp.size), self.dp)()
            self.clear(given)
            for parameter in given:
                parameter.grad = HeldGradient.stand_in(parameter)
                for piece in self._slices_of.get(id(parameter), []):
                    piece.shard.grad = LocalGradient.of(own[piece.in_shard])

    def _forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clear what ``model.zero_grad()``, or the program by hand, cleared or zeroed on these parameters."""
        parameters = list(parameters)
        if cleared := [p for p in parameters if p.grad is None]:
            self.clear(cleared)
        if zeroed := [p for p in parameters if is_stand_in(p.grad) and is_cleared(p.grad)]:
            self.clear(zeroed, set_to_none=False)

    def _stand_in(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            self._arrived.discard(id(parameter))
            if has_gradient(parameter):
                parameter.grad = HeldGradient.stand_in(parameter)


def lay_out(parameters: Iterable[nn.Parameter], dp: Axis, bucket_bytes: int) -> list[ShardedBucket]:
    """Stages 1 and 2: lay parameters that every rank holds into buckets, of each of which it steps a share.

    Args:
        parameters: of one group of the optimizer, with records, in the order in which backward finishes them.
        dp: the data-parallel axis.
        bucket_bytes: gradients communicate in buckets of this size.
    """
    buckets = make_buckets(parameters, max_bytes=bucket_bytes, multiple=dp.size, accumulate_in_float32=True)
    return [ShardedBucket(bucket, dp, WholeWeights(bucket, dp)) for bucket in buckets]


def bind_optimizer(optimizer: Optimizer, reduction: ReduceScatter) -> None:
    """Empty an optimizer's groups, for :func:`step_slices` to put slices in the place of the parameters.

    Args:
        optimizer: changed in place.
        reduction: told the optimizer's groups.
    """
    reduction.groups = [list(group["params"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []


def step_slices(optimizer: Optimizer, reduction: ReduceScatter, new: list[ShardedBucket]) -> None:
    """Put this rank's slices of some parameters into the groups of these, with the state that they already have.

    Args:
        optimizer: bound by :func:`bind_optimizer`; changed in place.
        reduction: knows the groups.
        new: buckets of parameters that were not stepped before.
    """
    pieces = [piece for sharded in new for piece in sharded.slices]
    for group, parameters in zip(optimizer.param_groups, reduction.groups, strict=True):
        members = {id(p) for p in parameters}
        for piece in pieces:
            if id(piece.parameter) in members:
                group["params"].append(piece.shard)
                if piece.parameter in optimizer.state:
                    state = optimizer.state[piece.parameter].items()
                    optimizer.state[piece.shard] = {key: _slice_state(value, piece) for key, value in state}
    for sharded in new:
        for parameter in sharded.bucket.parameters:
            optimizer.state.pop(parameter, None)


def _slice_state(value: Any, piece: Slice) -> Any:
    if torch.is_tensor(value) and value.shape == piece.parameter.shape and value.ndim:
        part = value.flatten()[piece.start : piece.start + piece.shard.numel()]
        return part.to(piece.shard.dtype).clone()
    return value.clone() if torch.is_tensor(value) else value


def hook_optimizer(optimizer: Optimizer, reduction: ReduceScatter) -> None:
    """Have the steps of a bound optimizer use the reduced gradients, and reach the model."""

    def prepare(*_: Any) -> None:
        for sharded in reduction.sharded:
            sharded.weights.take_over()
        reduction.settle()

    optimizer.register_step_pre_hook(prepare)

    def publish(*_: Any) -> None:
        for sharded in reduction.sharded:
            sharded.weights.publish()

    optimizer.register_step_post_hook(publish)

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        reduction.clear((p for group in reduction.groups for p in group), set_to_none=set_to_none)

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
