"""Parameters in one flat tensor, sharded evenly over the data-parallel ranks; those of float8 layers are cast before
they are gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.faults.interpose import about
from meshwright.layout.row_layout import Span
from meshwright.layout.tensor_layout import layout_of
from meshwright.mesh.axes import Axis
from meshwright.optim.zero.segments import EqualSlices
from meshwright.parallel.autograd_graph import in_backward
from meshwright.parallel.collectives import maximum, start_all_gather
from meshwright.parallel.gradients.buckets import Bucket, flat_dtype
from meshwright.parallel.shards.sharded_parameter import ShardedParameter, guard
from meshwright.parallel.shards.stand_in import own_shape, reading_shards
from meshwright.parallel.tensor_parallel.float8 import WeightCast


class FlatShard:
    """This rank's part of some parameters under ZeRO-3, and all of their elements while they are gathered.

    While its layer is not running, a parameter has its shape and dtype, but no memory. Elementwise arithmetic then
    works on this rank's elements, and any operation that needs all elements raises (see ``ShardedParameter``).

    Args:
        parameters: parameters of one dtype, all trainable or all frozen; the constructor leaves them unchanged.
        shapes: shape of this rank's TP shard of each parameter.
        ownership: which elements each rank keeps, and steps if they are trainable.
        device: device of this rank's part, which is in float32 if the parameters are trainable and half-precision.
        on_host: whether the host steps this rank's part, and keeps its copy in float32 (offload).
    """

    holds_all = False

    def __init__(
        self,
        parameters: list[nn.Parameter],
        shapes: list[torch.Size],
        ownership: EqualSlices,
        device: torch.device,
        *,
        on_host: bool = False,
    ):
        self.parameters, self.shapes, self.ownership, self.dp = parameters, shapes, ownership, ownership.axis
        first = parameters[0]
        self.dtype, self.is_trained = first.dtype, first.requires_grad
        sizes = [shape.numel() for shape in shapes]
        offsets, numel = ownership.pack(sizes)
        spans = [stop - start for start, stop in pairwise(offsets)]
        self._sizes, self._spans = sizes, [*spans, numel - offsets[-1]]  # the last one is padding
        self.rows = [ownership.rows(start, size, numel) for start, size in zip(offsets[:-1], sizes, strict=True)]
        segment = ownership.segment(numel)
        self._starts = offsets[:-1]
        self._begins = [start - segment.start for start in self._starts]
        self._stepped, self.is_on_host = flat_dtype(self.dtype) if self.is_trained else self.dtype, on_host
        master_dtype = self.dtype if on_host else self._stepped
        self.master = torch.zeros(segment.stop - segment.start, dtype=master_dtype, device=device)
        self.stand_in = torch.full((), torch.nan, dtype=self.dtype, device=device)
        self._stand_ins = [self.stand_in.expand(shape) for shape in shapes]
        self.is_lent = self.is_guarded = False
        self.lend_again: Callable[[], None] = lambda: None  # in backward; set by the unit, which gathers in its turn
        self.is_kept = False  # whole on every rank until its values change
        self.is_apart = False  # some ranks may not use the parameters in a pass that others use them in
        self._full: Tensor | None = None
        self._storage: int | None = None  # the storage of the gathered tensor
        self._wait: Callable[[], Tensor] | None = None

    @property
    def bucket(self) -> Bucket:
        """A gradient bucket of the same parameters."""
        return Bucket(self.parameters, self._stepped, self.ownership.pack, is_apart=self.is_apart)

    def keep(self, index: int, local: Tensor) -> Tensor:
        """Copy this rank's part out of a parameter's TP shard; return a placeholder for the parameter."""
        self.own(index).copy_(self.own_of(index, local))
        return self.stand_in.expand(local.shape)

    @property
    def is_full(self) -> bool:
        """Whether all elements of the parameters are gathered."""
        return self._full is not None

    def start(self) -> None:
        """Start the all-gather, unless it was started already."""
        if self._full is None and self._wait is None:
            # A tensor that is gathered under inference_mode may be used after inference_mode ends.
            with torch.inference_mode(False), torch.no_grad(), about(self._named):
                self._wait = start_all_gather(self._sent(), self.dp)

    @functools.cached_property
    def _named(self) -> str:
        return f" with {layout_of(self.parameters[0]).name}, which all ranks gather together under zero_stage=3"

    def full(self) -> Tensor:
        """Return all elements of the parameters, gathered now if they were not."""
        self.start()
        if self._wait is not None:
            self._full, self._wait = self._wait(), None
            self._storage = self._full.untyped_storage()._cdata
        assert self._full is not None
        return self._full

    def release(self) -> None:
        """Drop the gathered tensor; its memory is freed when nothing uses it any more."""
        if self._wait is not None:
            self._wait()
        self._full = self._storage = self._wait = None
        self.is_kept = False

    def leave(self) -> None:
        """Drop the gathered tensor after a unit has used it, unless it is kept."""
        if not self.is_kept:
            self.release()

    # The gathered values are stale after the optimizer's step, and after new values were written into ``master``.
    publish = refresh = release

    def take_over(self) -> None:
        """Shard and keep the values that the program assigned with ``parameter.data = ...``, if any.

        Raises:
            ValueError: if a parameter was cast or given another shape.
        """
        if self.is_lent:
            return
        storage = self.stand_in.untyped_storage()._cdata
        for index, parameter in enumerate(self.parameters):
            if parameter.untyped_storage()._cdata == storage:
                continue
            if (parameter.dtype, own_shape(parameter)) != (self.dtype, self.shapes[index]):
                shape = tuple(own_shape(parameter))
                raise ValueError(
                    f"{layout_of(parameter).name} is now {parameter.dtype} {shape}, but ZeRO stage 3 "
                    f"keeps {self.dtype} {tuple(self.shapes[index])} in shards, which the change would not reach. "
                    "Call model.to(...), .double(), .float() or the like before to_distributed"
                )
            with reading_shards():
                parameter.data = self.keep(index, parameter.data)
            self.release()

    def split(self) -> list[FlatShard]:
        """Split into a FlatShard of the trainable and a FlatShard of the frozen parameters; a collective call."""
        groups: dict[bool, list[int]] = {}
        for index, parameter in enumerate(self.parameters):
            groups.setdefault(parameter.requires_grad, []).append(index)
        whole = start_all_gather(self._own_values(), self.dp)()
        segments = [segment for _, segment in self._segments(whole)]
        parts = []
        for indices in groups.values():
            shapes = [self.shapes[index] for index in indices]
            some = [self.parameters[index] for index in indices]
            part = self._like(some, shapes)
            part.is_apart = self.is_apart
            for new, index in enumerate(indices):
                self.parameters[index].data = part.keep(new, segments[index])
            if self.is_guarded:
                part.guard()
            parts.append(part)
        self.release()
        return parts

    def lend(self) -> None:
        """Give the parameters their gathered values."""
        self.is_lent = True
        for parameter, segment in self._segments(self.full()):
            if self.is_guarded:
                parameter.__class__ = nn.Parameter
            parameter.data = segment

    def take_back(self) -> None:
        """Replace the parameters' values with placeholders."""
        self.is_lent = False
        with reading_shards():
            for parameter, stand_in in zip(self.parameters, self._stand_ins, strict=True):
                parameter.data = stand_in
                if self.is_guarded:
                    guard(parameter)

    def guard(self) -> None:
        """Make each parameter a ``ShardedParameter`` of this rank's elements while it has no gathered values."""
        for index, parameter in enumerate(self.parameters):
            guard(parameter, _OwnElements(self, index))
        self.is_guarded = all(type(parameter) is ShardedParameter for parameter in self.parameters)

    def own(self, index: int) -> Tensor:
        """Return this rank's elements of a parameter, as the optimizer steps them. Writes change the parameter."""
        return self.master[self._place(index)]

    def own_of(self, index: int, local: Tensor) -> Tensor:
        """Return this rank's elements of a tensor that has the shape of the parameter's TP shard."""
        low, high = self._span(index)
        return local.flatten()[low:high]

    def holds(self, tensor: Tensor, storage: int) -> bool:
        """Return whether ``tensor``, which has this storage, is a view of the gathered tensor."""
        return storage == self._storage and tensor.dtype == self.dtype

    def _own_values(self) -> Tensor:
        """Return this rank's part in the dtype of the parameters."""
        return self.master if self.master.dtype == self.dtype else self.master.to(self.dtype)

    def _sent(self) -> Tensor:
        """Return what the ranks gather; called where gradients and inference_mode are off."""
        return self._own_values()

    def _like(self, parameters: list[nn.Parameter], shapes: list[torch.Size]) -> FlatShard:
        """Return a new FlatShard of some of the parameters."""
        return FlatShard(parameters, shapes, self.ownership, self.master.device, on_host=self.is_on_host)

    def _segments(self, full: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        pieces = full.split_with_sizes(self._spans)[:-1]
        for parameter, piece, shape, size, span in zip(
            self.parameters, pieces, self.shapes, self._sizes, self._spans[:-1], strict=True
        ):
            yield parameter, (piece if size == span else piece[:size]).view(shape)

    def _place(self, index: int) -> slice:
        """Return where in ``master`` this rank's elements of a parameter are."""
        low, high = self._span(index)
        begin = self._begins[index] if low < high else 0
        return slice(begin + low, begin + high)

    def _span(self, index: int) -> Span:
        return self.rows[index].spans[self.dp.rank][0]


class _OwnElements:
    """Gives a ShardedParameter access to its values; see ``Values``."""

    def __init__(self, flat: FlatShard, index: int):
        self.flat, self.index = flat, index

    def own(self) -> Tensor:
        return self.flat.own(self.index)

    def cut(self, local: Tensor) -> Tensor:
        return self.flat.own_of(self.index, local)

    def lend(self) -> None:
        self.flat.lend_again()

    def changed(self) -> None:
        self.flat.release()
        if in_backward():
            raise ValueError(
                f"{layout_of(self.flat.parameters[self.index]).name} was changed inside of a backward pass, by a "
                "gradient that is this rank's own: under ZeRO stage 3 gradients are reduced after it, and each rank "
                "holds other elements. Make the change in a hook on the parameter's gradient, which runs after the "
                "reduction: parameter.register_post_accumulate_grad_hook(hook)"
            )


class Float8Shard(FlatShard):
    """This rank's part of some weights, which are in float8 while they are gathered.

    The scale of a weight is that of the whole tensor. The ranks compute it together each time forward gathers the
    weights, and backward, before which no optimizer steps, uses it again. The layers ask for :meth:`weight`: the
    parameters themselves never have values, so that no other code reads rounded ones.

    Args (the others are those of FlatShard):
        cast: how the weights are cast.
        tp: the axis that may cut the weights.
    """

    def __init__(self, *args: Any, cast: WeightCast, tp: Axis, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._cast, self._tp = cast, tp
        self._scales: Tensor | None = None

    def weight(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a weight in float8, in the shape of this rank's TP shard, and its scale."""
        full = self.full().view(self._cast.dtype)
        assert self._scales is not None
        shape, start = self.shapes[index], self._starts[index]
        return full[start : start + shape.numel()].view(shape), self._scales[index]

    def lend(self) -> None:
        self.full()
        self.is_lent = True

    def _sent(self) -> Tensor:
        own = self._own_values()
        places = [self._place(index) for index in range(len(self.parameters))]
        if self._scales is None or not in_backward():
            most = [own[place].abs().amax() if place.start < place.stop else own.new_zeros(()) for place in places]
            largest = torch.stack(most).to(torch.promote_types(self.dtype, torch.float32))
            for axis in (self.dp, self._tp):
                maximum(largest, axis)
            self._scales = self._cast.scales(largest)
        sent = torch.zeros_like(own, dtype=self._cast.dtype)
        for place, scale in zip(places, self._scales.unbind(), strict=True):
            sent[place] = self._cast(own[place], scale)
        return sent.view(torch.uint8)  # which every backend sends

    def _like(self, parameters: list[nn.Parameter], shapes: list[torch.Size]) -> FlatShard:
        device, cast, tp = self.master.device, self._cast, self._tp
        return Float8Shard(parameters, shapes, self.ownership, device, cast=cast, tp=tp, on_host=self.is_on_host)
