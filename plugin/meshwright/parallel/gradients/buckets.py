"""Flat buckets of parameters, in the order in which backward finishes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from meshwright.layout.tensor_layout import TensorLayout, layout_if_any, layout_of
from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import all_reduce
from meshwright.parallel.shards.stand_in import is_stand_in, own_nbytes, own_shape, reading_shards
from meshwright.plan.parts import packed

Pack = Callable[[Sequence[int]], tuple[list[int], int]]


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are reduced as one flat tensor.

    The padding between and after the parameters is zero.

    Args:
        parameters: the bucket's parameters, of one dtype and on one device.
        dtype: the dtype of the flat gradient; float32 for half-precision parameters under ZeRO.
        pack: function of the sizes of the parameters that returns their offsets, with the end of the last, and the
            length of the bucket; under ZeRO that of an ``EqualSlices``.
        is_apart: whether some ranks may have no gradients in a pass that gives others some, so that it is reduced once
            backward has ended, when no rank gathers weights in between.
    """

    parameters: list[nn.Parameter]
    dtype: torch.dtype
    pack: Pack = packed
    is_apart: bool = False
    offsets: list[int] = field(init=False)
    numel: int = field(init=False)
    _end: int = field(init=False)  # of the last parameter, with its padding
    _shapes: list[torch.Size] = field(init=False)
    _sizes: list[int] = field(init=False)
    _spans: list[int] = field(init=False)  # the sizes with their padding

    def __post_init__(self) -> None:
        self._shapes = [own_shape(p) for p in self.parameters]
        sizes = [shape.numel() for shape in self._shapes]
        offsets, self.numel = self.pack(sizes)
        *self.offsets, self._end = offsets
        self._sizes, self._spans = sizes, [stop - start for start, stop in pairwise(offsets)]

    @functools.cached_property
    def has_addends(self) -> bool:
        """Whether ranks of tp have addends of any of the gradients."""
        return bool(self._partial)

    @functools.cached_property
    def _partial(self) -> list[int]:
        """The indices of the parameters of whose gradients the ranks of tp have addends."""
        return [index for index, parameter in enumerate(self.parameters) if layout_of(parameter).has_addends]

    @functools.cached_property
    def are_parts(self) -> list[bool]:
        """For each parameter, whether its gradient on this rank is a part; see :func:`has_part`."""
        return list(map(has_part, self.parameters))

    @property
    def tp_numel(self) -> int:
        """The number of elements that :meth:`average_copies` sends."""
        if self._is_replicated:
            return self._end
        return sum(layout_of(self.parameters[index]).shape.numel() for index in self._partial)

    @functools.cached_property
    def _is_replicated(self) -> bool:
        """Whether every rank of tp holds every row, with a partial gradient."""
        return all(layout_of(p).has_addends and not layout_of(p).is_sharded for p in self.parameters)

    def segments(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its part of ``flat``, in the parameter's shape."""
        for index, parameter in enumerate(self.parameters):
            yield parameter, self._segment(flat, index)

    def _segment(self, flat: Tensor, index: int) -> Tensor:
        offset = self.offsets[index]
        return flat[offset : offset + self._sizes[index]].view(self._shapes[index])

    def flatten_gradients(self, scale: float, *, extra: int = 0) -> Tensor:
        """Return one flat tensor: all gradients times ``scale`` (zeros if missing), then ``extra`` zeros."""
        flat = torch.empty(self.numel + extra, dtype=self.dtype, device=self.parameters[0].device)
        *pieces, rest = flat.split_with_sizes([*self._spans, self.numel + extra - self._end])
        with reading_shards():
            for parameter, piece, size, span in zip(self.parameters, pieces, self._sizes, self._spans, strict=True):
                if size < span:
                    piece[size:].zero_()
                    piece = piece[:size]
                gradient = parameter.grad
                if gradient is None or is_stand_in(gradient):
                    piece.zero_()
                else:
                    torch.mul(gradient, scale, out=piece.view(parameter.shape))
        if self._end < self.numel + extra:
            rest.zero_()
        return flat

    def take_gradients(self, scale: float) -> Tensor:
        """Return what :meth:`flatten_gradients` returns, and maybe use the memory of ``.grad``, which must be replaced.

        A large parameter, such as an embedding, has a bucket of its own, so that its gradient is flat already. Scaling
        it in place saves a copy of this size and the time to fill it.
        """
        with reading_shards():
            gradient = self.parameters[0].grad
            if self.numel == self._sizes[0] and gradient is not None and _can_be_scaled(gradient, self.dtype):
                return gradient.as_subclass(Tensor).view(-1).mul_(scale)
            return self.flatten_gradients(scale)

    def average_copies(self, flat: Tensor, tp: Axis) -> None:
        """Replace every copy of a row's gradient by the mean over the copies, in place, with one all-reduce.

        Each contribution was multiplied by the number of copies on arrival (see GradientSync), so
        this mean is the sum of the contributions. Gradients that are not partial stay as they are.
        """
        if self._is_replicated:
            # Norms and biases, whose rows every rank holds, take two kernels together instead of several each.
            all_reduce(flat[: self._end], tp).div_(tp.size)
            return
        partial = [(layout_of(self.parameters[index]), self._segment(flat, index)) for index in self._partial]
        full = [_whole(layout, segment).flatten() for layout, segment in partial]
        joined = all_reduce(torch.cat(full), tp)
        pieces = joined.split([len(whole) for whole in full])
        for whole, (layout, segment) in zip(pieces, partial, strict=True):
            whole = whole.view(layout.shape)
            if layout.is_sharded:
                torch.div(layout.take(whole), layout.copies(segment), out=segment)
            else:
                torch.div(whole, tp.size, out=segment)


def _can_be_scaled(gradient: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a gradient is flat, of this dtype, and the only tensor that has its memory."""
    if is_stand_in(gradient) or gradient.dtype != dtype or gradient.requires_grad:
        return False
    if gradient.layout != torch.strided or not gradient.is_contiguous():
        return False
    # Autograd gives two parameters one memory, e.g. if views of both are added. The second owner is `storage` itself.
    storage = gradient.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == 2


def _whole(layout: TensorLayout, segment: Tensor) -> Tensor:
    """Return a gradient of the one-device shape that has a rank's rows, and zeros in the other ranks' rows."""
    if not layout.is_sharded:
        return segment
    whole = torch.zeros(layout.shape, dtype=segment.dtype, device=segment.device)
    layout.add(whole, segment)
    return whole


def has_part(parameter: nn.Parameter) -> bool:
    """Return whether this rank has a part of a parameter's gradient, or a part of all gradients."""
    layout = layout_if_any(parameter)
    return layout is not None and (layout.is_sharded or layout.is_staged)


def has_gradient(parameter: nn.Parameter) -> bool:
    """Return whether ``.grad`` is a gradient and not the stand-in for a gradient that ZeRO has taken."""
    gradient = parameter.grad
    return gradient is not None and not is_stand_in(gradient)


def make_buckets(
    parameters: Iterable[nn.Parameter],
    *,
    max_bytes: int,
    accumulate_in_float32: bool,
    pack: Pack = packed,
    last_bytes: int | None = None,
) -> list[Bucket]:
    """Return buckets of the parameters, in the given order.

    Parameters whose gradients are partial over the TP axis get separate buckets at the end, since these gradients are
    first averaged over that axis.

    Args:
        parameters: the parameters, each with a layout.
        max_bytes: the size limit of a bucket; a larger parameter gets its own bucket.
        accumulate_in_float32: whether gradients of half-precision parameters are flattened in float32.
        pack: see Bucket.
        last_bytes: the size limit of the last bucket whose gradients are not partial; None for ``max_bytes``.
    """
    parameters = list(parameters)
    whole = [p for p in parameters if not layout_of(p).has_addends]
    partial = [p for p in parameters if layout_of(p).has_addends]
    groups = group_parameters(whole, max_bytes, last_bytes) + group_parameters(partial, max_bytes)
    return [Bucket(members, flat_dtype(members[0].dtype, accumulate_in_float32), pack) for members in groups]


def group_parameters(
    parameters: list[nn.Parameter], max_bytes: int, last_bytes: int | None = None
) -> list[list[nn.Parameter]]:
    """Return groups of one dtype and at most ``max_bytes`` each, ordered by the position of their last parameter."""
    tail = len(parameters) if last_bytes is None else _tail_start(parameters, last_bytes)
    groups: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for position, parameter in enumerate(parameters):
        if position == tail:
            filling.clear()
        group, filled = filling.get(parameter.dtype, ([], 0))
        if not group or filled + own_nbytes(parameter) > max_bytes:
            group, filled = [], 0
            groups.append(group)
        group.append(position)
        filling[parameter.dtype] = group, filled + own_nbytes(parameter)
    groups.sort(key=lambda group: group[-1])
    return [[parameters[position] for position in group] for group in groups]


def _tail_start(parameters: list[nn.Parameter], last_bytes: int) -> int:
    """Return the start of the longest tail of at most ``last_bytes``. The tail has at least one parameter."""
    start, filled = len(parameters) - 1, own_nbytes(parameters[-1]) if parameters else 0
    while start > 0 and filled + own_nbytes(parameters[start - 1]) <= last_bytes:
        start -= 1
        filled += own_nbytes(parameters[start])
    return start


def flat_dtype(dtype: torch.dtype, accumulate_in_float32: bool = True) -> torch.dtype:
    """Return the dtype of flat gradients, and of the copy that ZeRO's optimizer steps, for ``dtype`` parameters."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if is_half and accumulate_in_float32 else dtype
