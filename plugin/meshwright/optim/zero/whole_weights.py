"""The weights under ZeRO stages 1 and 2. Every rank holds all weights in flat tensors, and steps a part of each."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.layout.tensor_layout import layout_of
from meshwright.optim.zero.ownership import EqualSlices
from meshwright.parallel.async_numbers import is_deferred
from meshwright.parallel.collectives import all_gather_into
from meshwright.parallel.gradients.buckets import Bucket
from meshwright.parallel.saved_tensors import memory
from meshwright.parallel.shards.reads import own_shape, reading_shards


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
