"""Norms over channels of which each rank of tp has some: their mean square is that of the channels of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.layout.row_layout import RowLayout, expanded
from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import reduce_for_shards
from meshwright.roles.blocks.head_layout import HeadLayout


class WideNorm:
    """Makes an RMS norm over a sharded width use the mean square over all ranks.

    The stock module divides by the root mean square of the local part. The module's output times
    ``rms_local / rms_global`` is exact, however the module applies its weight.
    """

    def __init__(self, norm: nn.Module, rows: RowLayout, axis: Axis):
        self.axis, self.size = axis, rows.size
        eps: Any = getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))
        self.eps = float(eps)
        # A key head that several ranks hold counts once.
        self.weight = 1.0 / expanded(rows.copies(axis.rank), torch.empty(0, dtype=torch.float64))
        self._placed = self.weight  # on the device of the activations, since each copy to it would make the host wait
        norm.register_forward_hook(self._rescale)

    def _rescale(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        square = args[0].to(torch.promote_types(args[0].dtype, torch.float32)).pow(2)
        own_mean = square.mean(-1, keepdim=True)
        weighted = (square * self._placed_like(square)).sum(-1, keepdim=True)
        mean = reduce_for_shards(weighted, self.axis) / self.size
        result: Tensor = output * ((own_mean + self.eps) / (mean + self.eps)).sqrt().to(output.dtype)
        return result

    def _placed_like(self, x: Tensor) -> Tensor:
        if (self._placed.device, self._placed.dtype) != (x.device, x.dtype):
            with torch.inference_mode(False):  # backward saves it, in a later step too
                self._placed = self.weight.to(x)
        return self._placed


class GroupedNorm:
    """Makes an RMS norm over each of some groups of channels use the mean square over all ranks that have the group.

    As in :class:`WideNorm`, the stock module's output is rescaled. It gates its input or its output with a second
    argument, as Mamba2's norm does.

    Args:
        norm: the norm.
        rows: which of its channels each rank has.
        axis: the axis of these ranks.
        groups: which groups each rank has channels of, as key heads.
    """

    def __init__(self, norm: nn.Module, rows: RowLayout, axis: Axis, groups: HeadLayout):
        self.axis, self.count, self.size = axis, groups.kv_heads, rows.size // groups.kv_heads
        eps: Any = getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))
        self.eps = float(eps)
        self.gates_first = not getattr(norm, "norm_before_gate", False)
        self._own = torch.tensor(groups.local_kv_heads(axis.rank))
        norm.register_forward_hook(self._rescale, with_kwargs=True)

    def _rescale(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        x, gate = args[0], args[1] if len(args) > 1 else kwargs.get("gate")
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if gate is not None and self.gates_first:
            x = x * F.silu(gate.to(x.dtype))
        by_group = x.pow(2).unflatten(-1, (len(self._own), -1))
        own = self._own = self._own.to(x.device)  # once, since each copy would make the host wait
        sums = x.new_zeros(*x.shape[:-1], self.count).index_add(-1, own, by_group.sum(-1))
        mean = (reduce_for_shards(sums, self.axis) / self.size).index_select(-1, own)
        ratio = ((by_group.mean(-1) + self.eps) / (mean + self.eps)).sqrt().unsqueeze(-1).to(output.dtype)
        result: Tensor = (output.unflatten(-1, (len(own), -1)) * ratio).flatten(-2)
        return result
