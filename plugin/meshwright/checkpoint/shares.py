"""Which rank writes which elements of a checkpoint: each element once, by one of the ranks that hold it, evenly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from meshwright.checkpoint.regions import Block, between, numel, overlap, packed, shard
from meshwright.parallel.row_layout import RowLayout, ShardRecord, Span

_SPLIT = 2**16  # bytes; a smaller region is written by one rank, since each part of it costs a line in the index


@dataclass(frozen=True, kw_only=True)
class Held:
    """How a tensor is held by the ranks of a mesh.

    Args:
        dtype: its dtype.
        shape: its one-device shape.
        layout: the rows of each rank of the TP axis.
        cut: the elements of the flattened TP shard that each data-parallel rank holds; replicated if each holds all.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: RowLayout
    cut: RowLayout

    @staticmethod
    def whole(dtype: torch.dtype, shape: tuple[int, ...], tp: int, dp: int) -> Held:
        """Return how a tensor is held that every rank has whole."""
        rows = RowLayout.replicated(shape[0] if shape else 1, tp)
        return Held(dtype=dtype, shape=shape, layout=rows, cut=RowLayout.replicated(torch.Size(shape).numel(), dp))

    @staticmethod
    def shard(dtype: torch.dtype, record: ShardRecord, cut: RowLayout, tp: int) -> Held:
        """Return how a tensor is held that is sharded like a parameter."""
        held = Held.whole(dtype, tuple(record.global_shape), tp, len(cut.spans))
        return Held(dtype=dtype, shape=held.shape, layout=record.layout if record.is_sharded else held.layout, cut=cut)

    def part(self, tp_rank: int, dp_rank: int, spans: list[Span] | None = None) -> list[Block]:
        """Return the part of one rank; its storage is the tensor that the rank holds, flattened.

        Args:
            tp_rank, dp_rank: the rank's place.
            spans: rows to which the part is restricted; None for all.
        """
        blocks = shard(self.shape, self.layout, tp_rank, spans)
        if self.cut.is_replicated:
            return blocks
        ((start, stop),) = self.cut.spans[dp_rank]
        return between(blocks, start, stop)


def shares(tensors: Mapping[str, Held], tp: int, dp: int) -> list[dict[str, list[Block]]]:
    """Return what each rank writes of each tensor; every rank computes the same.

    The blocks of a share have the positions in the rank's file as storage, contiguous from 0 on. The result is indexed
    by ``dp_rank * tp + tp_rank``.
    """
    found: list[dict[str, list[Block]]] = [{} for _ in range(dp * tp)]
    load = [0] * (dp * tp)  # bytes

    def give(place: int, name: str, blocks: list[Block]) -> None:
        if size := numel(blocks):
            found[place].setdefault(name, []).extend(blocks)
            load[place] += size * tensors[name].dtype.itemsize

    for name, held in tensors.items():
        for holders, spans in _regions(held.layout, tp):
            if held.cut.is_replicated:
                places = [dp_rank * tp + rank for dp_rank in range(dp) for rank in holders]
                region = packed(held.part(holders[0], 0, spans))
                total = numel(region)
                if total * held.dtype.itemsize < _SPLIT:
                    give(min(places, key=load.__getitem__), name, region)
                    continue
                borders = [total * index // len(places) for index in range(len(places) + 1)]
                for place, (start, stop) in zip(places, pairwise(borders), strict=True):
                    give(place, name, between(region, start, stop))
            else:
                # The slices of these ranks may begin at other rows, so that one of them writes for all.
                rank = min(holders, key=lambda rank: sum(load[d * tp + rank] for d in range(dp)))
                for dp_rank in range(dp):
                    give(dp_rank * tp + rank, name, held.part(rank, dp_rank, spans))
    return [{name: packed(blocks) for name, blocks in share.items()} for share in found]


def copies(here: list[Block], there: list[Block], start: int, stop: int) -> list[Block]:
    """Return the elements that a part shares with the positions from ``start`` up to ``stop`` of another one's storage.

    In the blocks returned, ``local`` is a position in the storage of ``here``, and ``whole`` one relative to ``start``.
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
