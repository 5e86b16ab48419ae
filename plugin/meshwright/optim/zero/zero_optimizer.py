"""ZeRO: each data-parallel rank keeps the optimizer state of its share of every bucket of parameters.

The user's optimizer object stays, and its parameters become this rank's slices (see
:mod:`meshwright.optim.zero.sliced_optimizer`). Gradients are reduce-scattered in buckets during backward, and the
optimizer steps the slices. In stages 1 and 2 every rank holds all parameters, which are all-gathered after the step. In
stage 3 a rank keeps only its share of the parameters (see :mod:`meshwright.optim.zero.zero3_layers`). Passes under
``no_sync`` and micro-batches leave whole gradients in stage 1, and reduced shards in stages 2 and 3. Half-precision
parameters have float32 master slices and float32 gradients.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.layout.tensor_layout import TensorLayout, layout_of
from meshwright.optim.zero.segments import EqualSlices, HostCopy, WholeWeights, sliced
from meshwright.parallel.collectives import all_gather, all_reduce, start_reduce_scatter
from meshwright.parallel.gradients.buckets import Bucket, has_gradient, make_buckets
from meshwright.parallel.shards.sharded_parameter import LocalGradient
from meshwright.parallel.shards.stand_in import (
    HeldGradient,
    is_cleared,
    is_stand_in,
    own_shape,
    reading_shards,
    values_of,
)


class Weights(Protocol):
    """The storage of a bucket's parameter values, and the methods that a step calls to update them."""

    master: Tensor
    """This rank's segment of the flat bucket, which the optimizer steps, or with offload the host's copy of it."""

    holds_all: bool
    """Whether this rank's parameters have all values that are stepped, those of the other ranks' segments included."""

    def publish(self) -> None:
        """Make the next forward pass use the stepped values."""

    def refresh(self) -> None:
        """Use the values that were set from outside."""

    def take_over(self) -> None:
        """Before a step, use the values that the program wrote into the parameters, if any."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Slice:
    """The part of one parameter's elements that this rank steps.

    Args:
        parameter: the model's (TP-sharded) parameter.
        layout: which elements of the parameter each rank steps.
        shard: the optimizer's parameter, which has the gradient: a 1-d view into the bucket's master shard. With
            offload it has no values.
        in_shard: the part's position in the bucket's master shard.
        stepped: the parameter that has the values and the state in a step: ``shard``, or with offload a view into the
            bucket's copy on the host.
    """

    parameter: nn.Parameter
    layout: TensorLayout
    shard: nn.Parameter
    in_shard: slice
    stepped: nn.Parameter


class ShardedBucket:
    """A bucket of parameters of which this rank steps a segment.

    Args:
        bucket: the bucket, which ``ownership`` has packed.
        ownership: which elements each rank steps.
        weights: the storage of the parameters' values.
        on_host: whether the host steps the segment (offload).
    """

    def __init__(self, bucket: Bucket, ownership: EqualSlices, weights: Weights, *, on_host: bool = False):
        self.bucket, self.ownership, self.axis, self.weights = bucket, ownership, ownership.axis, weights
        self.host = HostCopy(weights.master, bucket.dtype) if on_host else None
        self.unsynced: Tensor | None = None  # this rank's own gradients from passes under no_sync
        self.slices = list(self._slices())

    def _slices(self) -> Iterator[Slice]:
        first = self.ownership.segment(self.bucket.numel).start
        for parameter, offset in zip(self.bucket.parameters, self.bucket.offsets, strict=True):
            layout = self.layout(parameter)
            low, high = layout.span()
            if low < high:
                in_shard = slice(offset + low - first, offset + high - first)
                own = self.weights.master[in_shard]
                if self.host is not None or own.dtype != self.bucket.dtype:  # of another dtype than the gradients
                    own = own.new_zeros((), dtype=self.bucket.dtype).expand(own.shape)
                shard = nn.Parameter(own)
                stepped = shard if self.host is None else nn.Parameter(self.host.master[in_shard])
                yield Slice(parameter=parameter, layout=layout, shard=shard, in_shard=in_shard, stepped=stepped)

    def layout(self, parameter: nn.Parameter) -> TensorLayout:
        """Return which elements of a parameter each rank steps."""
        (offset,) = (o for p, o in zip(self.bucket.parameters, self.bucket.offsets, strict=True) if p is parameter)
        rows = self.ownership.rows(offset, own_shape(parameter).numel(), self.bucket.numel)
        return sliced(layout_of(parameter), rows)

    def gather_gradients(self) -> Tensor:
        """Return the reduced gradients of the whole bucket, gathered on every rank."""
        own = torch.zeros_like(self.weights.master, dtype=self.bucket.dtype)
        for piece in self.slices:
            if piece.shard.grad is not None:
                own[piece.in_shard] = piece.shard.grad.as_subclass(Tensor)
        return all_gather(own, self.axis)

    def take_over(self) -> None:
        """Use the values that the program wrote into the parameters, if any, for what the optimizer has."""
        self.weights.take_over()
        if self.host is not None:
            self.host.take_over()

    def refresh(self) -> None:
        """Use the values of the parameters, all of which were set from outside."""
        self.weights.refresh()
        if self.host is not None:
            self.host.refresh()


Gradients = dict[int, Tensor]  # keyed by the ``id`` of a parameter, or of a slice's shard


class ReduceScatter:
    """ZeRO's reduction for GradientSync. Gradients go to the slices, and a parameter's ``.grad`` holds a stand-in.

    Args:
        can_wait: whether gradients of passes under ``no_sync`` are kept whole (stage 1).
        sent: the dtype in which gradients travel; None for that of the flat buckets.

    Attributes:
        sharded: all buckets.
        groups: the model's parameters in each of the optimizer's groups, including frozen ones.
        shards: this rank's slices of them, which the optimizer has during a step.
        num_steps: how many steps have changed the parameters.
        is_uneven: whether a pass since the last step ran some modules on some ranks only.
    """

    def __init__(self, *, can_wait: bool, sent: torch.dtype | None = None):
        self.sent = sent
        self.sharded: list[ShardedBucket] = []
        self.can_wait = can_wait
        self.groups: list[list[nn.Parameter]] = []
        self.shards: list[list[nn.Parameter]] = []
        self.num_steps = 0
        self.is_uneven = False
        self._of: dict[int, ShardedBucket] = {}
        self._with: dict[int, ShardedBucket] = {}
        self._slices_of: dict[int, list[Slice]] = {}
        self._arrived: set[int] = set()  # parameters whose ``.grad`` holds gradients of the running pass

    def extend(self, sharded: list[ShardedBucket]) -> None:
        """Add buckets, whose gradients are reduced from now on."""
        self.sharded += sharded
        for one in sharded:
            self._of[id(one.bucket)] = one
            self._with |= {id(p): one for p in one.bucket.parameters}
            for piece in one.slices:
                self._slices_of.setdefault(id(piece.parameter), []).append(piece)

    def bucket_of(self, parameter: nn.Parameter) -> ShardedBucket | None:
        """Return the bucket that has a parameter, if any."""
        return self._with.get(id(parameter))

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all buckets."""
        return (parameter for sharded in self.sharded for parameter in sharded.bucket.parameters)

    @property
    def slices(self) -> Iterator[Slice]:
        """This rank's slices of the parameters of all buckets."""
        return (piece for sharded in self.sharded for piece in sharded.slices)

    def prepare(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            self._forget_one(parameter)
        elif not has_gradient(parameter):
            self._forget([parameter])
            parameter.grad = None  # autograd must not add into the stand-in
        elif id(parameter) not in self._arrived:  # the program set this gradient, and the pass adds to it
            self._give_memory(parameter)
            gradient = parameter.grad
            self.clear([parameter])
            parameter.grad = gradient
        self._arrived.add(id(parameter))

    def part(self, parameter: nn.Parameter) -> Tensor | None:
        if parameter.grad is None:
            return None
        for piece in self._slices_of.get(id(parameter), ()):
            return None if piece.shard.grad is None else piece.shard.grad.as_subclass(Tensor)
        return torch.empty(0, dtype=self._with[id(parameter)].bucket.dtype, device=parameter.device)

    def put(self, parameter: nn.Parameter, part: Tensor | None) -> None:
        parameter.grad = None if part is None else HeldGradient.stand_in(parameter)
        for piece in self._slices_of.get(id(parameter), ()):
            piece.shard.grad = None if part is None else LocalGradient.of(part)

    def layout(self, parameter: nn.Parameter) -> TensorLayout:
        return self._with[id(parameter)].layout(parameter)

    def is_unsynced(self, parameter: nn.Parameter) -> bool:
        return self._with[id(parameter)].unsynced is not None

    def hold(self, bucket: Bucket) -> None:
        sharded = self._of[id(bucket)]
        if any(has_gradient(p) for p in bucket.parameters):
            flat = bucket.take_gradients(1 / sharded.axis.size)
            sharded.unsynced = flat if sharded.unsynced is None else sharded.unsynced.add_(flat)
            self._stand_in(bucket)

    def holds(self, bucket: Bucket) -> bool:
        return self._of[id(bucket)].unsynced is not None

    def take(self, bucket: Bucket) -> Tensor:
        sharded = self._of[id(bucket)]
        flat = bucket.take_gradients(1 / sharded.axis.size)
        if sharded.unsynced is not None:
            flat.add_(sharded.unsynced)
            sharded.unsynced = None
        return flat

    def start(self, bucket: Bucket, flat: Tensor) -> Callable[[], None]:
        sharded = self._of[id(bucket)]
        wait = start_reduce_scatter(
            flat.to(self.sent if self.sent and not flat.is_complex() else flat.dtype), sharded.axis, flat.dtype
        )
        if missing := [p for p in bucket.parameters if not has_gradient(p)]:
            self._forget(missing)  # another rank may have their gradients
        self._stand_in(bucket)
        # A slice of a gradient may be all zeros, so its values do not say that a rank has the gradient.
        has_one = [float(p.grad is not None) for p in bucket.parameters]
        counts_ranks = self.is_uneven or bucket.is_apart
        ranks = all_reduce(torch.tensor(has_one, device=flat.device), sharded.axis) if counts_ranks else None

        def finish() -> None:
            own = wait()
            # One read, only if this rank lacks a gradient that another may have: reading makes the host wait for CUDA.
            lacking = [piece.in_shard for piece in sharded.slices if piece.parameter.grad is None]
            others_have = iter(torch.stack([own[part].any() for part in lacking]).tolist() if lacking else ())
            if ranks is not None:
                counts = dict(zip(map(id, bucket.parameters), ranks.tolist(), strict=True))
                others_have = iter([counts[id(p.parameter)] for p in sharded.slices if p.parameter.grad is None])
            for piece in sharded.slices:
                gradient = own[piece.in_shard]
                # If no rank had a gradient, leave None, so that the optimizer skips the parameter as on one device.
                if piece.parameter.grad is None:
                    if not next(others_have):
                        continue
                    piece.parameter.grad = HeldGradient.stand_in(piece.parameter)  # another rank had a gradient
                if piece.shard.grad is None:
                    piece.shard.grad = LocalGradient.of(gradient)
                else:
                    piece.shard.grad.as_subclass(Tensor).add_(gradient)

        return finish

    @contextlib.contextmanager
    def aside(self, gradients: Gradients) -> Iterator[None]:
        """Make backward passes inside this context add to ``gradients`` and leave the model's gradients unchanged.

        ``gradients`` is empty at first.
        """
        before = self._exchange(gradients)
        try:
            yield
        finally:
            gradients |= self._exchange(before)

    def add(self, gradients: Gradients, factor: Tensor) -> None:
        """Add gradients from :meth:`aside`, times ``factor``, to the model's; ``gradients`` are overwritten."""
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
        """Replace all gradients with ``gradients``, and return the previous gradients that were not None."""
        holders = [*self.parameters, *(piece.shard for piece in self.slices)]
        before = {id(holder): holder.grad for holder in holders if holder.grad is not None}
        for holder in holders:
            holder.grad = gradients.pop(id(holder), None)
        return before

    def clear(self, parameters: Iterable[nn.Parameter], *, set_to_none: bool = True) -> None:
        """Clear all gradients of these parameters, synchronised or not, or set them to zero if not ``set_to_none``."""
        cleared = {id(p): p for p in parameters}
        for key, parameter in cleared.items():
            shards = [piece.shard for piece in self._slices_of.get(key, ())]
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

    def take_over(self) -> None:
        """Before the slices are read, use in them the values that the program wrote into the parameters, if any."""
        for sharded in self.sharded:
            sharded.take_over()

    def publish(self, *_: object) -> None:
        """Make the next forward pass use what an optimizer has made of the slices."""
        self.num_steps += 1
        for sharded in self.sharded:
            sharded.weights.publish()

    def settle(self) -> None:
        """Clear or set the slices' gradients where the program cleared or set gradients of the model.

        A gradient that the program set is averaged over dp. If it is equal on all ranks, it stays the same.
        """
        self._forget(self.parameters)
        for sharded in self.sharded:
            if not any(map(has_gradient, sharded.bucket.parameters)):
                continue
            given = [p for p in sharded.bucket.parameters if has_gradient(p)]
            for parameter in given:
                self._give_memory(parameter)
                assert parameter.grad is not None
                layout_of(parameter).zero_padding(parameter.grad.as_subclass(Tensor))
            own = start_reduce_scatter(sharded.bucket.flatten_gradients(1 / sharded.axis.size), sharded.axis)()
            self.clear(given)
            for parameter in given:
                parameter.grad = HeldGradient.stand_in(parameter)
                for piece in self._slices_of.get(id(parameter), []):
                    piece.shard.grad = LocalGradient.of(own[piece.in_shard])

    def _give_memory(self, parameter: nn.Parameter) -> None:
        """Let a gradient that the program computed from shards without memory (stage 3) be averaged like any other."""
        if (values := values_of(parameter.grad)) is None:
            return
        with reading_shards():
            whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            values.cut(whole).copy_(values.own() * self._with[id(parameter)].axis.size)  # each element is on one rank
            parameter.grad = whole

    def _forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clear or zero the slices' gradients of those parameters whose gradients the program cleared or zeroed."""
        parameters = list(parameters)
        if cleared := [p for p in parameters if p.grad is None]:
            self.clear(cleared)
        if zeroed := [p for p in parameters if is_stand_in(p.grad) and is_cleared(p.grad)]:
            self.clear(zeroed, set_to_none=False)

    def _forget_one(self, parameter: nn.Parameter) -> None:
        """Do what :meth:`_forget` does for a parameter without a gradient; each gradient of each pass needs this."""
        for piece in self._slices_of.get(id(parameter), ()):
            piece.shard.grad = None
        if (sharded := self._with.get(id(parameter))) is not None and sharded.unsynced is not None:
            self.clear([parameter])

    def _stand_in(self, bucket: Bucket) -> None:
        first = bucket.parameters[0]
        zero = torch.zeros((), dtype=first.dtype, device=first.device)
        for parameter in bucket.parameters:
            self._arrived.discard(id(parameter))
            if has_gradient(parameter):
                parameter.grad = HeldGradient.stand_in(parameter, zero)


def lay_out(
    parameters: Iterable[nn.Parameter], ownership: EqualSlices, bucket_bytes: int, *, on_host: bool = False
) -> list[ShardedBucket]:
    """Put parameters that every rank holds (stages 1 and 2) into buckets of which each rank steps a share.

    Args:
        parameters: parameters of one optimizer group, with layouts, in the order in which backward finishes them.
        ownership: which elements each rank steps.
        bucket_bytes: size of the buckets in which gradients are reduced.
        on_host: whether the host steps the shares (offload).
    """
    buckets = make_buckets(parameters, max_bytes=bucket_bytes, accumulate_in_float32=True, pack=ownership.pack)
    return [
        ShardedBucket(bucket, ownership, WholeWeights(bucket, ownership, on_host=on_host), on_host=on_host)
        for bucket in buckets
    ]


def slice_copies(piece: Slice) -> Tensor | float:
    """Return the number of copies over the axes tp and pp of each element of a slice."""
    return piece.layout.copies(piece.shard) * piece.layout.stage_copies
