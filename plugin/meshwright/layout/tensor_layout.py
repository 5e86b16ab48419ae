"""Says of one tensor which of its elements each rank of a mesh holds, and what the ranks' gradients of it are."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.errors import PlanError
from meshwright.layout.row_layout import RowLayout, expanded
from meshwright.mesh.axes import Mesh


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """The layout of one tensor on a mesh; a parameter of a distributed model has it as ``.meshwright``.

    Each axis that cuts the tensor gives each of its ranks some rows along one dim; different axes cut different dims.
    A shard is what all cuts leave::

        whole [8, 6]      cuts: tp along dim 0, ep along dim 1       shard [4, 3] of tp=1, ep=0
        ┌─────┬─────┐
        │     │     │ tp=0
        ├─────┼─────┤
        │  x  │     │ tp=1
        └─────┴─────┘
         ep=0  ep=1

    Args:
        shape: the tensor's one-device shape.
        cuts: the name of each axis that may cut the tensor, with the rows of each of its ranks. The rows are replicated
            if every rank of the axis holds the whole tensor.
        addends: the axes of which each rank that holds an element computes an addend of the element's gradient (norms
            under sequence parallelism, replicated key/value heads). The gradient is the sum over these ranks.
        stages: the ranks of pp that hold the tensor; several for an embedding tied to a head on another rank. None
            without a pipeline.
        name: the tensor's one-device name, once it is placed.
        place: this rank's coordinate on each axis, once it is placed.

    Example:
        >>> layout = TensorLayout(shape=torch.Size([8, 2]), cuts=(("tp", RowLayout.even(8, 2)),), place={"tp": 1})
        >>> layout.take(torch.arange(16).view(8, 2))[:, 0].tolist()
        [8, 10, 12, 14]
    """

    shape: torch.Size
    cuts: tuple[tuple[str, RowLayout], ...] = ()
    addends: frozenset[str] = frozenset()
    stages: tuple[int, ...] | None = None
    name: str = field(default="", compare=False)
    place: Mapping[str, int] = field(default_factory=dict, compare=False)

    @staticmethod
    def whole(tensor: Tensor, tp: int = 1, *, addends: frozenset[str] = frozenset()) -> TensorLayout:
        """Return the layout of a tensor that every rank of tp holds, with the whole gradient or an addend of it."""
        rows = RowLayout.replicated(tensor.shape[0] if tensor.ndim else 1, tp)
        return TensorLayout(shape=tensor.shape, cuts=(("tp", rows),), addends=addends)

    def placed(self, name: str, mesh: Mesh) -> TensorLayout:
        """Return the layout of the tensor of this name, as the rank with this place on a mesh sees it."""
        axes = ("pp", "dp", "cp", "tp", "tokens", "ep")
        place = {axis: getattr(mesh, axis).rank for axis in axes}
        return dataclasses.replace(self, name=name, place=place)

    # The next properties are computed once: they are read for every gradient of every step.
    @functools.cached_property
    def is_held(self) -> bool:
        """Whether a pipeline stage of this rank holds the tensor. If not, zeros without memory are in its place."""
        return self.stages is None or self.place.get("pp", 0) in self.stages

    @functools.cached_property
    def is_sharded(self) -> bool:
        """Whether this rank has only a part of the tensor, or nothing of it."""
        return not (self.is_held and all(rows.is_replicated for _, rows in self.cuts))

    @functools.cached_property
    def has_addends(self) -> bool:
        """Whether a backward pass gives each rank that holds a row only an addend of the row's gradient."""
        return bool(self.addends)

    @property
    def is_staged(self) -> bool:
        """Whether the model's tensors are spread over pipeline stages, so that this rank has nothing of the others."""
        return self.stages is not None

    @property
    def stage_copies(self) -> int:
        """The number of ranks of pp that hold the tensor."""
        return 1 if self.stages is None else len(self.stages)

    @property
    def first_stage(self) -> int:
        """The first rank of pp that holds the tensor."""
        return 0 if self.stages is None else self.stages[0]

    @functools.cached_property
    def local_shape(self) -> torch.Size:
        """The shape of a rank's shard, padding included."""
        shape = list(self.shape)
        for _, rows in self.cuts:
            if not rows.is_replicated:
                shape[rows.dim] = rows.local_size
        return torch.Size(shape)

    def rank(self, axis: str) -> int:
        """Return this rank's coordinate on an axis; 0 on one that the layout was not placed on."""
        return self.place.get(axis, 0)

    @functools.cached_property
    def is_over_ep(self) -> bool:
        """Whether ranks of dp hold different experts, so that only some of dp have a gradient of the same elements."""
        return any(axis == "ep" for axis, _ in self.cuts)

    def over(self, axis: str) -> RowLayout:
        """Return the rows that each rank of an axis holds.

        Raises:
            PlanError: if the tensor is cut over ep; what knows other axes alone would take a part for the whole.
        """
        if self.is_over_ep and axis != "ep":
            raise PlanError(
                f"{self.name} holds experts that ParallelPlan.ep spreads over dp, and this call cannot read or write "
                "such weights yet. Use full_state_dict or save_pretrained for the weights, or spread the experts over "
                "tp: plan='tp2+sp ep2'"
            )
        for name, rows in self.cuts:
            if name == axis:
                return rows
        return RowLayout.replicated(self.shape[0] if self.shape else 1, 1)

    def take(self, full: Tensor) -> Tensor:
        """Return a contiguous copy of this rank's shard of ``full``."""
        shard = full
        for axis, rows in self.cuts:
            shard = rows.take(shard, self.place[axis])
        return shard if self.cuts else full.clone(memory_format=torch.contiguous_format)

    def add(self, full: Tensor, local: Tensor) -> None:
        """Add this rank's shard to ``full``, in place."""
        pairs = [(full, local)]
        for axis, rows in self.cuts:
            pairs = [pair for whole, part in pairs for pair in rows.pairs(whole, part, self.place[axis])]
        for target, piece in pairs:
            target.add_(piece)

    def zero_padding(self, local: Tensor) -> None:
        """Set the padding rows of a shard to zero, in place."""
        for axis, rows in self.cuts:
            real = rows.real_rows(self.place[axis])
            if missing := rows.local_size - real:
                local.narrow(rows.dim, real, missing).zero_()

    def copies(self, like: Tensor) -> Tensor | float:
        """Return how many ranks of the axes that cut hold each element, shaped to broadcast over the shard."""
        count: Tensor | float = 1.0
        for axis, rows in self.cuts:
            runs = rows.copies(self.place[axis])
            if len({copies for _, copies in runs}) == 1:
                count = count * runs[0][1]
                continue
            shape = [1] * len(self.shape)
            shape[rows.dim] = rows.local_size
            count = count * expanded(runs, like).view(shape)
        return count


def layout_of(parameter: Tensor) -> TensorLayout:
    """Return the layout of a parameter of a distributed model."""
    layout = layout_if_any(parameter)
    assert layout is not None, "a parameter has no layout, so it was not distributed"
    return layout


def layout_if_any(x: object) -> TensorLayout | None:
    """Return the layout of a parameter, of its gradient or of a buffer; None if it has none."""
    # Not getattr: reading any attribute of a guarded parameter takes microseconds.
    return getattr(x, "__dict__", {}).get("meshwright")


def is_held(tensor: Tensor) -> bool:
    """Return whether this rank has values of a model's parameter or buffer; not so for those of other stages."""
    layout = layout_if_any(tensor)
    return layout is None or layout.is_held


def global_shape(tensor: Tensor) -> torch.Size:
    """Return the one-device shape of a model's parameter or buffer, sharded or not."""
    layout = layout_if_any(tensor)
    return tensor.shape if layout is None else layout.shape
