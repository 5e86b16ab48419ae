"""Give stock attention code this rank's part of biases and masks for each head, which it gets as arguments."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from meshwright.mesh.axes import Axis
from meshwright.roles.blocks.head_layout import HeadLayout


class HeadInputs:
    """Cuts an attention block's per-head arguments (biases, and masks that contain biases) to this rank's heads."""

    def __init__(self, attention: nn.Module, heads: HeadLayout, axis: Axis):
        self._names = tuple(inspect.signature(attention.forward).parameters)
        self._heads, self._rank = heads, axis.rank

    def take_own(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the arguments, cut to this rank's heads."""
        own = [self._take(name, value) for name, value in zip(self._names, args, strict=False)]
        cut = {name: self._take(name, kwargs[name]) for name in PER_HEAD if name in kwargs}
        return (*own, *args[len(own) :]), {**kwargs, **cut}

    def _take(self, name: str, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        if value.ndim == 4 and name in PER_HEAD and value.shape[1] == self._heads.heads:
            return self._heads.take_heads(value, self._rank, dim=1)
        if value.ndim == 3 and name in _HEAD_BIASES:  # dim 0 is heads, or batch times heads
            return self._heads.take_heads(value, self._rank)
        return value


_HEAD_BIASES = ("alibi", "position_bias")
PER_HEAD = ("attention_mask", *_HEAD_BIASES, "rel_pos", "rel_2d_pos")
