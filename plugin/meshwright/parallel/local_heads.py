"""Give stock attention code this rank's head counts and per-head biases.

Attention code reads these counts and biases separately from the projection weights.
"""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from meshwright.mesh.axes import Axis
from meshwright.parallel.head_layout import HeadLayout
from meshwright.parallel.structure import Block
from meshwright.roles.linear_kernel import kernel_of


class LocalConfig:
    """A model's config with some values replaced, for one module that reads its head counts from the config."""

    def __init__(self, config: object, **local: int):
        self.__dict__.update(_config=config, **local)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or "_config" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_config"], name)


def localise_attributes(block: Block) -> None:
    """Set the head counts and widths in a block's modules to those of this rank's part."""
    module: object = block.module
    for projection in (*block.columns, block.row):
        if (kernel := kernel_of(projection)) is not None:
            kernel.fit(projection)
    for name, value in block.local_attributes.items():
        setattr(module, name, value)
    if block.heads is not None and block.has_fused_qkv and hasattr(module, "config"):
        module.config = LocalConfig(
            module.config,
            num_attention_heads=block.heads.local_heads,
            num_key_value_heads=block.heads.num_local_kv_heads,
        )


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
        cut = {name: self._take(name, kwargs[name]) for name in _PER_HEAD if name in kwargs}
        return (*own, *args[len(own) :]), {**kwargs, **cut}

    def _take(self, name: str, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        if value.ndim == 4 and name in _PER_HEAD and value.shape[1] == self._heads.heads:
            return self._heads.take_heads(value, self._rank, dim=1)
        if value.ndim == 3 and name in _HEAD_BIASES:  # dim 0 is heads, or batch times heads
            return self._heads.take_heads(value, self._rank)
        return value


_HEAD_BIASES = ("alibi", "position_bias")
_PER_HEAD = ("attention_mask", *_HEAD_BIASES)
