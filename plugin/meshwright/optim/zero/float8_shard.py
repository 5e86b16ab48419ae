"""Weights of float8 layers that are cast before they are gathered, so that one byte travels for each element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.mesh.axes import Axis
from meshwright.optim.zero.flat_parameters import FlatShard
from meshwright.parallel.autograd_graph import in_backward
from meshwright.parallel.collectives import maximum
from meshwright.parallel.tensor_parallel.float8_weights import WeightCast


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
