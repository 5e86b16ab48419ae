"""Says of one tensor which of its elements each rank of a mesh holds, and what the ranks' gradients of it are."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.errors import PlanError
from meshwright.layout.packed_weights import stored_shape
from meshwright.layout.row_layout import RowLayout, Span, StridedBlock, between, expanded
from meshwright.mesh.axes import Mesh, Place


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """The layout of one tensor on a mesh; a parameter of a distributed model has it as ``.meshwright``.

    Each axis that cuts the tensor gives each of its ranks some rows along one dim; different axes cut different dims.
    A shard is what all cuts leave. ZeRO may cut the flattened shard once more::

        whole [8, 6]      cuts: tp along dim 0, ep along dim 1       shard [4, 3] of tp=1, ep=0
        ┌─────┬─────┐
        │     │     │ tp=0
        ├─────┼─────┤
        │  x  │     │ tp=1
        └─────┴─────┘
         ep=0  ep=1                                                  flat: [6] of tokens=0, [6] of tokens=1

    Args:
        shape: the tensor's one-device shape.
        cuts: the name of each axis that may cut the tensor, with the rows of each of its ranks. The rows are replicated
            if every rank of the axis holds the whole tensor.
        flat: the name of the axis that cuts the flattened shard, with the elements of each of its ranks, which are one
            span; None if each rank holds its shard as it is.
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
    flat: tuple[str, RowLayout] | None = None
    addends: frozenset[str] = frozenset()
    stages: tuple[int, ...] | None = None
    name: str = field(default="", compare=False)
    place: Place = field(default_factory=dict, compare=False)

    @staticmethod
    def whole(tensor: Tensor, tp: int = 1, *, addends: frozenset[str] = frozenset()) -> TensorLayout:
        """Return the layout of a tensor that every rank of tp holds, with the whole gradient or an addend of it."""
        shape = stored_shape(tensor)
        rows = RowLayout.replicated(shape[0] if shape else 1, tp)
        return TensorLayout(shape=shape, cuts=(("tp", rows),), addends=addends)

    def placed(self, name: str, mesh: Mesh) -> TensorLayout:
        """Return the layout of the tensor of this name, as the rank with this place on a mesh sees it."""
        return dataclasses.replace(self, name=name, place=mesh.place)

    def resized(self, shape: torch.Size) -> TensorLayout:
        """Return the layout of a tensor of another shape that is whole on the ranks that have all of this one."""
        if self.flat is None:  # of another stage, which alone knows who has it
            return dataclasses.replace(self, shape=shape, cuts=())
        axis, rows = self.flat
        size = shape.numel()
        spans = tuple(((0, size if stop > start else 0),) for ((start, stop),) in rows.spans)
        return dataclasses.replace(self, shape=shape, flat=(axis, RowLayout(0, size, spans)))

    def flattened(self, rows: RowLayout, axis: str = "tokens") -> TensorLayout:
        """Return the layout of this tensor if an axis cuts the flattened shards as ``rows`` says."""
        return dataclasses.replace(self, flat=(axis, rows))

    # The next properties are computed once: they are read for every gradient of every step.
    @functools.cached_property
    def is_held(self) -> bool:
        """Whether a pipeline stage of this rank holds the tensor. If not, NaN without memory is in its place."""
        return self._has(self.place)

    def _has(self, place: Place) -> bool:
        return self.stages is None or place.get("pp", 0) in self.stages

    @functools.cached_property
    def is_sharded(self) -> bool:
        """Whether this rank has only a part of the tensor, or nothing of it."""
        return not self.is_held or self.is_cut

    @functools.cached_property
    def is_cut(self) -> bool:
        """Whether ranks have different parts of the tensor."""
        return self.is_sliced or not all(rows.is_replicated for _, rows in self.cuts)

    @property
    def is_sliced(self) -> bool:
        """Whether ranks have different elements of a flattened shard."""
        return self.flat is not None and not self.flat[1].is_replicated

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
    def shard_shape(self) -> torch.Size:
        """The shape of a rank's shard, padding included, before a flat cut."""
        shape = list(self.shape)
        for _, rows in self.cuts:
            if not rows.is_replicated:
                shape[rows.dim] = rows.local_size
        return torch.Size(shape)

    @functools.cached_property
    def local_shape(self) -> torch.Size:
        """The shape of what this rank has of the tensor, padding included."""
        start, stop = self.span()
        return self.shard_shape if self.flat is None else torch.Size([stop - start])

    @property
    def local_numel(self) -> int:
        """The number of elements that this rank has, padding included."""
        return self.local_shape.numel() if self.is_held else 0

    def rank(self, axis: str) -> int:
        """Return this rank's coordinate on an axis; 0 on one that the layout was not placed on."""
        return self.place.get(axis, 0)

    @functools.cached_property
    def is_over_ep(self) -> bool:
        """Whether the tensor is of experts that ranks share, whose replicas are the ranks of the axis ``copies``."""
        return any(axis == "ep" for axis, _ in self.cuts)

    def is_cut_over(self, axis: str) -> bool:
        """Whether ranks of an axis have different parts of the tensor."""
        return any(name == axis and not rows.is_replicated for name, rows in self.cuts)

    def over(self, axis: str) -> RowLayout:
        """Return the rows that each rank of an axis holds.

        Raises:
            PlanError: if the tensor is cut over ep; what knows other axes alone would take a part for the whole.
        """
        if self.is_over_ep and axis not in ("ep", "etp"):
            raise PlanError(
                f"{self.name} holds experts that ParallelPlan.ep or etp spreads over ranks, and this call cannot read "
                "or write such weights yet. Use full_state_dict or save_pretrained for the weights, or set ep=1 and "
                "etp=1"
            )
        for name, rows in self.cuts:
            if name == axis:
                return rows
        return RowLayout.replicated(self.shape[0] if self.shape else 1, 1)

    def span(self, place: Place | None = None) -> Span:
        """Return which elements of the flattened shard a rank has, of whose coordinates ``place`` is (default: own)."""
        if self.flat is None:
            return 0, self.shard_shape.numel()
        axis, rows = self.flat
        return rows.spans[(self.place if place is None else place)[axis]][0]

    def blocks(
        self, place: Place | None = None, spans: Mapping[int, Sequence[Span]] | None = None
    ) -> list[StridedBlock]:
        """Return a rank's elements, without padding; their storage is what the rank has of the tensor, flattened.

        Args:
            place: the rank's coordinates; None for this rank's.
            spans: for some dims, the rows of the whole tensor to which the blocks are restricted.
        """
        place, spans = self.place if place is None else place, spans or {}
        if not self._has(place):
            return []
        own = {rows.dim: rows.spans[place[axis]] for axis, rows in self.cuts if not rows.is_replicated}
        found, local, whole = [StridedBlock(0, 0, 1)], 1, 1
        for dim in reversed(range(len(self.shape))):
            size, offset, inner, found = self.shape[dim], 0, found, []
            for start, stop in own.get(dim, [(0, size)]):
                for first, last in spans.get(dim, [(0, size)]):
                    low, count = max(start, first), min(stop, last) - max(start, first)
                    for block in inner if count > 0 else ():
                        first_row = block.moved((offset + low - start) * local, low * whole)
                        found += first_row.repeated(count, local, whole)
                offset += stop - start
            local, whole = local * self.shard_shape[dim], whole * size
        return found if self.flat is None else between(found, *self.span(place))

    def regions(self, places: Sequence[Place]) -> Iterator[tuple[list[list[list[int]]], dict[int, list[Span]]]]:
        """Yield the parts of the tensor that different ranks hold: the ranks, and the rows of the part along each dim.

        The ranks are grouped. All ranks of a group have the same elements, and the groups of one list have together
        each element of the part once. There is one such list for each shard that has the part. If several stages of
        the pipeline hold the tensor, the ranks are those of the first, since each stage slices its shards by itself.

        Args:
            places: the coordinates of all ranks.
        """
        cuts = [(axis, rows) for axis, rows in self.cuts if not rows.is_replicated]
        slicing = self.flat[0] if self.flat is not None and self.is_sliced else None
        shards: dict[tuple[int, ...], dict[int, list[int]]] = {}
        for rank, place in enumerate(places):
            if not self.is_staged or place["pp"] == self.first_stage:
                groups = shards.setdefault(tuple([place[axis] for axis, _ in cuts]), {})
                groups.setdefault(place[slicing] if slicing is not None else 0, []).append(rank)
        for part in itertools.product(*(rows.holders() for _, rows in cuts)):
            held = [list(shards[own].values()) for own in itertools.product(*(ranks for ranks, _ in part))]
            spans = {rows.dim: own_rows for (_, rows), (_, own_rows) in zip(cuts, part, strict=True)}
            yield held if slicing is not None else [[sorted(rank for (ranks,) in held for rank in ranks)]], spans

    def own(self, local: Tensor) -> Tensor:
        """Return this rank's elements of a tensor that has the shape of its shard, 1-d."""
        start, stop = self.span()
        return local.flatten()[start:stop]

    def take(self, full: Tensor) -> Tensor:
        """Return a contiguous copy of what this rank has of ``full``."""
        shard = full
        for axis, rows in self.cuts:
            shard = shard if rows.is_replicated else rows.take(shard, self.place[axis])
        if self.flat is not None:
            return self.own(shard).clone()
        return full.clone(memory_format=torch.contiguous_format) if shard is full else shard

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
        """Return how many ranks of the axes that cut hold each element, shaped to broadcast over what this rank has."""
        count: Tensor | float = 1.0
        for axis, rows in self.cuts:
            runs = rows.copies(self.place[axis])
            if len({copies for _, copies in runs}) == 1:
                count = count * runs[0][1]
                continue
            shape = [1] * len(self.shape)
            shape[rows.dim] = rows.local_size
            count = count * expanded(runs, like).view(shape)
        if self.flat is None or isinstance(count, float):
            return count
        return self.own(count.expand(self.shard_shape))


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
