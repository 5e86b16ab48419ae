"""Decides which rank writes which elements of a checkpoint: each element once, evenly over the ranks that hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from meshwright.checkpoint.one_device.blocks import StridedBlock, between, numel, overlap, packed, shard
from meshwright.layout.row_layout import RowLayout, Span
from meshwright.layout.tensor_layout import TensorLayout

_SPLIT = 2**16  # bytes; a smaller region is written by one rank, since each part of it costs a line in the index


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place on a mesh."""

    pp: int = 0
    dp: int = 0
    tp: int = 0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a mesh."""

    pp: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def by_axis(self) -> dict[str, int]:
        """The sizes by the names of the axes."""
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}

    def index(self, place: Place) -> int:
        """Return the index of a rank: tp varies fastest, then dp, then pp."""
        return (place.pp * self.dp + place.dp) * self.tp + place.tp

    def place(self, index: int) -> Place:
        """Return the place of the rank with an index."""
        rest, tp = divmod(index, self.tp)
        pp, dp = divmod(rest, self.dp)
        return Place(pp=pp, dp=dp, tp=tp)


@dataclass(frozen=True, kw_only=True)
class Held:
    """How a tensor is held by the ranks of a mesh.

    Args:
        dtype: its dtype.
        shape: its one-device shape.
        layout: the rows of each rank of the TP axis.
        cut: the elements of the flattened TP shard that each data-parallel rank holds; None if each holds all.
        stages: the ranks of pp that hold the tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: RowLayout
    cut: RowLayout | None = None
    stages: tuple[int, ...] = (0,)

    @staticmethod
    def of(
        dtype: torch.dtype,
        shape: tuple[int, ...],
        sizes: Sizes,
        record: TensorLayout | None = None,
        cut: RowLayout | None = None,
    ) -> Held:
        """Return how the ranks hold a tensor that is sharded like a parameter.

        Args:
            dtype, shape: the dtype and the one-device shape of the tensor.
            sizes: the sizes of the mesh.
            record: the record of the parameter; None for a tensor that every rank has whole.
            cut: the elements of the flattened shard of each data-parallel rank; None if each has all.
        """
        if record is None or record.over("tp").is_replicated:
            layout = RowLayout.replicated(shape[0] if shape else 1, sizes.tp)
        else:
            layout = record.over("tp")
        return Held(
            dtype=dtype,
            shape=tuple(shape),
            layout=layout,
            cut=None if cut is None or cut.is_replicated else cut,
            stages=tuple(range(sizes.pp)) if record is None else (record.stages or (0,)),
        )

    def part(self, place: Place, spans: list[Span] | None = None) -> list[StridedBlock]:
        """Return the part of one rank; its storage is the tensor that the rank holds, flattened.

        Args:
            place: the rank's place.
            spans: rows to which the part is restricted; None for all.
        """
        if place.pp not in self.stages:
            return []
        blocks = shard(self.shape, self.layout, place.tp, spans)
        if self.cut is None:
            return blocks
        ((start, stop),) = self.cut.spans[place.dp]
        return between(blocks, start, stop)


def assign_writes(tensors: Mapping[str, Held], sizes: Sizes) -> list[dict[str, list[StridedBlock]]]:
    """Return what each rank writes of each tensor, by the rank's index; every rank computes the same.

    The blocks of a share have the positions in the rank's file as storage, contiguous from 0 on.
    """
    found: list[dict[str, list[StridedBlock]]] = [{} for _ in range(sizes.ranks)]
    load = [0] * sizes.ranks  # bytes

    def give(place: int, name: str, blocks: list[StridedBlock]) -> None:
        if size := numel(blocks):
            found[place].setdefault(name, []).extend(blocks)
            load[place] += size * tensors[name].dtype.itemsize

    for name, held in tensors.items():
        for holders, spans in _regions(held.layout, sizes.tp):
            if held.cut is None:
                places = [
                    sizes.index(Place(pp=stage, dp=dp_rank, tp=rank))
                    for stage in held.stages
                    for dp_rank in range(sizes.dp)
                    for rank in holders
                ]
                region = packed(held.part(Place(pp=held.stages[0], dp=0, tp=holders[0]), spans))
                total = numel(region)
                if total * held.dtype.itemsize < _SPLIT:
                    give(min(places, key=load.__getitem__), name, region)
                    continue
                borders = [total * index // len(places) for index in range(len(places) + 1)]
                for place, (start, stop) in zip(places, pairwise(borders), strict=True):
                    give(place, name, between(region, start, stop))
            else:
                # The slices of these ranks may begin at other rows, so that one of them writes for all.
                columns = [
                    [Place(pp=stage, dp=dp_rank, tp=rank) for dp_rank in range(sizes.dp)]
                    for stage in held.stages
                    for rank in holders
                ]
                column = min(columns, key=lambda places: sum(load[sizes.index(place)] for place in places))
                for own in column:
                    give(sizes.index(own), name, held.part(own, spans))
    return [{name: packed(blocks) for name, blocks in share.items()} for share in found]


def copies(here: list[StridedBlock], there: list[StridedBlock], start: int, stop: int) -> list[StridedBlock]:
    """Return the elements that a part shares with the positions from ``start`` up to ``stop`` of another one's storage.

    In the returned blocks, ``local`` is a position in the storage of ``here``, and ``whole`` is relative to ``start``.
    """
    return list(overlap(here, between(there, start, stop)))


def _regions(layout: RowLayout, tp: int) -> list[tuple[tuple[int, ...], list[Span]]]:
    """The rows of a tensor, by the ranks of the TP axis that hold them."""
    spans = layout.spans if len(layout.spans) == tp else layout.spans[:1] * tp
    borders = sorted({border for rows in spans for span in rows for border in span})
    found: dict[tuple[int, ...], list[Span]] = {}
    for low, high in pairwise(borders):
        holders = tuple(
            rank for rank, rows in enumerate(spans) if any(start <= low and high <= stop for start, stop in rows)
        )
        if holders:
            found.setdefault(holders, []).append((low, high))
    return list(found.items())
