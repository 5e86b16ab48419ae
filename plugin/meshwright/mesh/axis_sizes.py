"""The parallel axes of a plan, by name and in order. All other code asks for sizes by name or iterates over the names.

This module does not import torch, so that the planner and ``--help`` can use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Self

AXES = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor"}  # name -> kind, the outermost axis first
PLAN_AXES = ("dp", "tp", "cp", "pp")  # the same axes in the order in which a plan is written
# Axis -> the fields of a plan that say how it is used, and mean nothing if its size is 1.
OPTIONS = {"cp": ("context", "ulysses"), "pp": ("schedule", "chunks", "stages"), "tp": ("sequence_parallel",)}


class AxisSizes:
    """The sizes of the axes by name, for a dataclass with a field or a property for each axis."""

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, from the outermost to the innermost."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def sizes_beside_dp(self) -> dict[str, int]:
        """The sizes of the other axes, whose ranks have the same rows of a batch, in the order of a plan."""
        return {name: getattr(self, name) for name in PLAN_AXES if name != "dp"}

    @property
    def group_sizes(self) -> dict[str, int]:
        """The number of ranks that communicate for each axis: gradients are averaged over dp and cp together."""
        sizes = self.sizes
        return sizes | {"dp": sizes["dp"] * sizes["cp"]}

    @property
    def world_size(self) -> int:
        """The number of ranks: the product of the sizes."""
        return math.prod(self.sizes.values())

    def can_share_experts(self, ranks: int) -> bool:
        """Return whether runs of so many neighbours of dp x cp x tp are parts of a group of tp, or whole groups."""
        tp = self.sizes["tp"]
        return self.world_size // self.sizes["pp"] % ranks == 0 and (ranks % tp == 0 or tp % ranks == 0)

    def resized(self, sizes: Mapping[str, int]) -> Self:
        """Return a copy with other sizes of some axes."""
        return replace(self, **sizes)  # type: ignore[type-var]

    def product(self, *axes: str) -> str:
        """Return the sizes of these axes, by default of all, as in "dp=2 x tp=2"."""
        return " x ".join(f"{name}={getattr(self, name)}" for name in axes or PLAN_AXES)
