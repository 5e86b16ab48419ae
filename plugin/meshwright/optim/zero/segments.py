"""The segment of each bucket that a rank steps under ZeRO stages 1 and 2, on the device or on the host.

Every rank holds all weights in flat tensors, and steps a part of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import TensorLayout, layout_of
from meshwright.mesh.axes import Axis, Mesh
from meshwright.parallel.async_numbers import is_deferred
from meshwright.parallel.collectives import all_gather_into
from meshwright.parallel.gradients.buckets import Bucket
from meshwright.parallel.saved_tensors import memory
from meshwright.parallel.shards.stand_in import own_shape, reading_shards
from meshwright.plan.parts import packed


def stepped_over(layout: TensorLayout, mesh: Mesh) -> Axis:
    """Return the axis whose ranks have the same elements of a tensor before ZeRO cuts them, and share their steps."""
    axis: Axis = getattr(mesh, _axis(layout))
    return axis


def sliced(layout: TensorLayout, rows: RowLayout) -> TensorLayout:
    """Return the layout of a tensor whose flattened shard is cut into these rows over the axis of ``stepped_over``."""
    return layout.flattened(rows, _axis(layout))


def _axis(layout: TensorLayout) -> str:
    return "copies" if layout.is_over_ep else "tokens"


@dataclass(frozen=True)
class EqualSlices:
    """Decides which elements of the parameters each rank of an axis steps.

    Parameters are packed into flat buckets, and each rank steps one of as many equal segments of each bucket. A segment
    may begin inside of a parameter, so that all ranks step equally many elements::

        [ A A A A A A A A | A A A B B B . . ]    parameters A and B over two ranks

    The optimizer must update each element from that element alone (see :mod:`meshwright.optim.elementwise`).

    Args:
        axis: the axis whose ranks share the steps.
    """

    axis: Axis

    def pack(self, sizes: Sequence[int]) -> tuple[list[int], int]:
        """Return the offset of each parameter in a bucket, then the end of the last; and the bucket's length.

        Args:
            sizes: the number of elements of each parameter on this rank.
        """
        return packed(sizes, self.axis.size)

    def segment(self, numel: int) -> slice:
        """Return this rank's segment of a bucket of ``numel`` elements."""
        length = numel // self.axis.size
        return slice(self.axis.rank * length, (self.axis.rank + 1) * length)

    def rows(self, offset: int, size: int, numel: int) -> RowLayout:
        """Return which elements of a flattened parameter each rank steps.

        Args:
            offset: the parameter's offset in its bucket.
            size: the number of elements of the parameter on this rank.
            numel: the length of the bucket.
        """
        return RowLayout.stretches(offset, size, numel // self.axis.size, self.axis.size)


class HostCopy:
    """What the host has of this rank's segment of a bucket.

    The copies to and from the device go through pinned memory, so that the host does not wait for them.

    Args:
        own: this rank's segment of the weights, on their device.
        dtype: the dtype in which the segment is stepped: float32 for weights in half precision.

    Attributes:
        master: the values that the optimizer steps.
        gradient: memory for the gradients of a step.
    """

    def __init__(self, own: Tensor, dtype: torch.dtype):
        self._own, self._is_async = own, own.is_cuda
        self._values = _pinned(own, own.dtype)
        self.master = self._values if dtype == own.dtype else torch.zeros(own.shape, dtype=dtype, device="cpu")
        self.gradient = _pinned(own, dtype)
        self.refresh()

    def fetch(self, gradients: Iterable[tuple[slice, Tensor]]) -> None:
        """Start to copy the weights and these gradients, each with its place in the segment, to the host."""
        self._values.copy_(self._own, non_blocking=self._is_async)
        for place, gradient in gradients:
            self.gradient[place].copy_(gradient.as_subclass(Tensor), non_blocking=self._is_async)

    def take_in(self) -> None:
        """Use what the program wrote into the weights since they were sent, once they have been fetched.

        Elements that it did not write keep the bits that only ``master`` has.
        """
        if self.master is self._values:
            return
        sent = self.master.to(self._values.dtype)
        if not torch.equal(self._values, sent):
            self.master.copy_(torch.where(self._values == sent, self.master, self._values.to(self.master.dtype)))

    def take_over(self) -> None:
        """Fetch the weights, wait for them, and use what the program wrote into them."""
        self._values.copy_(self._own)
        self.take_in()

    def refresh(self) -> None:
        """Use the weights, all of which were set from outside."""
        self._values.copy_(self._own)
        if self.master is not self._values:
            self.master.copy_(self._values)

    def send(self) -> None:
        """Start to copy the stepped values to the device."""
        if self.master is not self._values:
            self._values.copy_(self.master)
        self._own.copy_(self._values, non_blocking=self._is_async)


def on_host(option: object) -> object:
    """Return an option of an optimizer, such as a learning rate, with its tensors on the host."""
    if isinstance(option, Tensor):
        return option.cpu()
    if isinstance(option, list):
        return [on_host(part) for part in option]
    return tuple(on_host(part) for part in option) if isinstance(option, tuple) else option


def _pinned(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(like.shape, dtype=dtype, device="cpu", pin_memory=like.is_cuda)


class SideStream:
    """Runs copies from a device to the host beside what the device does next.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, copy: Callable[[], None]) -> Callable[[], None]:
        """Start copies of what the device has computed so far, and return a function that waits for them."""
        if self._stream is None:
            copy()
            return lambda: None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copy()
            copied = torch.cuda.Event()
            copied.record()
        return copied.synchronize


class WholeWeights:
    """The parameters of a bucket as views of one flat tensor that every rank holds.

    Args:
        bucket: the bucket.
        ownership: which part of it each rank steps.
        on_host: whether the host steps it, and keeps its copy in float32 (offload).
    """

    def __init__(self, bucket: Bucket, ownership: EqualSlices, *, on_host: bool = False):
        self.bucket, self.dp = bucket, ownership.axis
        first = bucket.parameters[0]
        self.flat = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        for parameter, segment in bucket.segments(self.flat):
            segment.copy_(parameter.data)
            parameter.data = segment
        self._shapes = [own_shape(p) for p in bucket.parameters]
        self.own = self.flat[ownership.segment(bucket.numel)]
        self.master = self.own if on_host or bucket.dtype == first.dtype else self.own.to(bucket.dtype)
        self.holds_all = self.master is self.own and not on_host

    def publish(self) -> None:
        """All-gather the stepped values to every rank."""
        if self.master is not self.own:
            self.own.copy_(self.master)
        all_gather_into(self.flat, self.own, self.dp)

    def refresh(self) -> None:
        """Update ``master`` with the weights, all of which were set from outside."""
        if self.master is not self.own:
            self.master.copy_(self.own)

    def take_over(self) -> None:
        """Update ``flat`` and ``master`` with what the program wrote into the parameters since the last step.

        Raises:
            ValueError: if a parameter was cast, moved to another device or given another shape.
        """
        with reading_shards():
            self._take_over()

    def _take_over(self) -> None:
        storage, _ = memory(self.flat)
        for parameter in self.bucket.parameters:
            if memory(parameter)[0] != storage:
                self._move_back(parameter)
        if self.master is self.own:
            return
        # Values are compared, since torch does not count writes through ``parameter.data``. Unwritten elements keep the
        # bits that only the master has. On a GPU, waiting for the comparison would take longer than the copy.
        if is_deferred(self.own.device) or not torch.equal(self.own, self.master.to(self.own.dtype)):
            is_kept = self.own == self.master.to(self.own.dtype)
            self.master.copy_(torch.where(is_kept, self.master, self.own.to(self.master.dtype)))

    def _move_back(self, parameter: nn.Parameter) -> None:
        """Copy values that were assigned with ``parameter.data = ...`` into the flat tensor."""
        position = next(i for i, p in enumerate(self.bucket.parameters) if p is parameter)
        shape, offset = self._shapes[position], self.bucket.offsets[position]
        if (parameter.dtype, parameter.device, parameter.shape) != (self.flat.dtype, self.flat.device, shape):
            raise ValueError(
                f"{layout_of(parameter).name} is now {parameter.dtype} {tuple(parameter.shape)} on {parameter.device}, "
                f"but ZeRO steps {self.flat.dtype} {tuple(shape)} on {self.flat.device}. No step would reach it. Call "
                "model.to(...), .double(), .float() or the like before to_distributed (or shard_optimizer)"
            )
        segment = self.flat[offset : offset + shape.numel()].view(shape)
        segment.copy_(parameter.data)
        parameter.data = segment
