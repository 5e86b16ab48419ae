"""The weights of ZeRO stages 1 and 2: whole on every rank, in flat tensors of which each rank steps a part."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.parallel.buckets import Bucket
from meshwright.parallel.collectives import Axis, all_gather_into
from meshwright.parallel.layout import record_of
from meshwright.parallel.saved import memory
from meshwright.parallel.sharded import reading_shards


class WholeWeights:
    """The parameters of a bucket, laid into one flat tensor that every rank holds.

    Args:
        bucket: its length divides by the size of ``dp``.
        dp: the data-parallel axis.
    """

    def __init__(self, bucket: Bucket, dp: Axis):
        self.bucket, self.dp = bucket, dp
        first = bucket.parameters[0]
        self.flat = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        for parameter, segment in bucket.segments(self.flat):
            segment.copy_(parameter.data)
            parameter.data = segment
        self._shapes = [p.shape for p in bucket.parameters]
        length = bucket.numel // dp.size
        self._start = dp.rank * length
        self.own = self.flat[self._start : self._start + length]
        self.master = self.own if bucket.dtype == first.dtype else self.own.to(bucket.dtype)
        self._versions = self._read_versions()

    def publish(self) -> None:
        """Give every rank the values that were stepped."""
        if self.master is not self.own:
            self.own.copy_(self.master)
        all_gather_into(self.flat, self.own, self.dp)

    def refresh(self) -> None:
        """Take over values that were set from outside, all of them."""
        if self.master is not self.own:
            self.master.copy_(self.own)
            self._versions = self._read_versions()

    def take_over(self) -> None:
        """Take over what the program wrote into the parameters since the last step, if anything.

        Raises:
            ValueError: for parameters that were cast, moved to another device or given another shape.
        """
        with reading_shards():
            self._take_over()

    def _take_over(self) -> None:
        storage, _ = memory(self.flat)
        moved = [p for p in self.bucket.parameters if memory(p)[0] != storage]
        for parameter in moved:
            self._move_back(parameter)
        if self.master is self.own:
            return
        versions = self._read_versions()
        members = zip(self.bucket.parameters, self.bucket.offsets, self._versions, versions, strict=True)
        given = {id(p) for p in moved}
        for parameter, offset, before, now in members:
            if before != now or id(parameter) in given:
                low, high = max(offset - self._start, 0), offset + parameter.shape.numel() - self._start
                own, master = self.own[low : max(high, low)], self.master[low : max(high, low)]
                # What was not written keeps the bits that only the master has.
                master.copy_(torch.where(own == master.to(own.dtype), master, own.to(master.dtype)))
        self._versions = versions

    def _move_back(self, parameter: nn.Parameter) -> None:
        """Copy values that were assigned by ``parameter.data = ...`` to where they are stepped."""
        position = next(i for i, p in enumerate(self.bucket.parameters) if p is parameter)
        shape, offset = self._shapes[position], self.bucket.offsets[position]
        if (parameter.dtype, parameter.device, parameter.shape) != (self.flat.dtype, self.flat.device, shape):
            raise ValueError(
                f"{record_of(parameter).name} is now {parameter.dtype} {tuple(parameter.shape)} on {parameter.device}, "
                f"and ZeRO steps {self.flat.dtype} {tuple(shape)} on {self.flat.device}: no step would reach it. Call "
                "model.to(...), .double(), .float() or the like before to_distributed (or shard_optimizer)"
            )
        segment = self.flat[offset : offset + shape.numel()].view(shape)
        segment.copy_(parameter.data)
        parameter.data = segment

    def _read_versions(self) -> list[int]:
        """How often each parameter was written in place; a write through ``parameter.data`` is not counted."""
        return [p._version for p in self.bucket.parameters] if self.master is not self.own else []
