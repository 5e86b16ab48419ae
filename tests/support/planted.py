"""Models that a plan trains wrongly without a word, each in one way; their factories are run in processes of their own.

What is planted is planted in the distributed program only, as a bug of the runtime or a wrong sharding plan would be.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import meshwright as mw
from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import layout_of
from meshwright.mesh.axes import Axis
from meshwright.parallel.gradients.buckets import Bucket
from meshwright.parallel.tensor_parallel.block_boundary import BlockHooks
from meshwright.pipeline.pipeline_forward import PipelineForward
from meshwright.roles import decoder_roles
from meshwright.roles.blocks.head_layout import HeadLayout
from support.models import build
from support.planted_hooks import of_runtime


def _is_distributed() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def norm_not_summed() -> nn.Module:
    """Each rank keeps its own tokens' part of the gradient of one norm."""
    average: Callable[..., None] = Bucket.average_copies

    def average_the_others(self: Bucket, flat: Tensor, tp: Axis) -> None:
        own = [
            (segment, segment.clone())
            for parameter, segment in self.segments(flat)
            if layout_of(parameter).name == "model.layers.1.input_layernorm.weight"
        ]
        average(self, flat, tp)
        for segment, before in own:
            segment.copy_(before)

    if _is_distributed():
        Bucket.average_copies = average_the_others  # type: ignore[method-assign]
    return build("llama")


def bias_added_twice() -> nn.Module:
    """Rank 0 adds the bias of an output projection to its partial sum too."""
    lift: Callable[..., None] = BlockHooks._lift_bias

    @of_runtime
    @functools.wraps(lift)
    def lift_elsewhere(self: BlockHooks, module: nn.Module, args: tuple[Any, ...]) -> None:
        lift(self, module, args)
        if self.axis.rank == 0:
            self._row._parameters["bias"] = self._bias

    if _is_distributed():
        BlockHooks._lift_bias = lift_elsewhere  # type: ignore[method-assign]
    return build("llama")


def wrong_fused_order() -> nn.Module:
    """A sharding plan that takes rows of all queries, all keys, all values for rows by key head."""
    if _is_distributed():
        roles = decoder_roles(
            attention_roles={"qkv_proj": mw.Role.QKV_BY_GROUP, "o_proj": mw.Role.O},
            mlp_roles={"gate_up_proj": mw.Role.GATE_UP, "down_proj": mw.Role.DOWN},
        )
        mw.register_plan("phi3", mw.ShardingPlan(roles=roles))
    return build("phi3")


def uneven_heads() -> nn.Module:
    """The border between the ranks goes through a head."""

    def rows(self: HeadLayout) -> RowLayout:
        size, half = self.heads * self.head_dim, self.head_dim // 2
        border, last = size // 2 - half, size - half
        return RowLayout(0, size, (((0, border), (last, size)), ((border, last),)))

    if _is_distributed():
        HeadLayout.query_rows = rows  # type: ignore[method-assign]
    return build("llama")


def tie_not_summed() -> nn.Module:
    """Each of two pipeline stages keeps its own part of the gradient of the embedding that is also the head."""
    if _is_distributed():
        PipelineForward._sum_ties = lambda *_: None  # type: ignore[method-assign]
    return build("gemma2")


def hook_of_several_ranks() -> nn.Module:
    """A hook that computes something else where there are several ranks."""
    model = build("llama")

    def doubled(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * (2 if _is_distributed() else 1), *args[1:])

    model.get_submodule("model.layers.1.mlp.down_proj").register_forward_pre_hook(doubled)
    return model
