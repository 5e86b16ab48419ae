"""Decides which rank writes which elements of a checkpoint: each element once, evenly over the ranks that hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from meshwright.layout.blocks import StridedBlock, between, numel, packed
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Place

_SPLIT = 2**16  # bytes; a smaller part is written by one rank, since each piece of it costs a line in the index


def assign_writes(
    tensors: Mapping[str, tuple[torch.dtype, TensorLayout]], places: Sequence[Place]
) -> list[dict[str, list[StridedBlock]]]:
    """Return what each rank writes of each tensor, by the rank's index; every rank computes the same.

    The blocks of a share have the positions in the rank's file as storage, contiguous from 0 on.

    Args:
        tensors: the dtype and the layout of each tensor.
        places: the coordinates of all ranks.
    """
    found: list[dict[str, list[StridedBlock]]] = [{} for _ in places]
    load = [0] * len(places)  # bytes

    def lightest(ranks: Sequence[int]) -> int:
        return min(ranks, key=load.__getitem__)

    for name, (dtype, layout) in tensors.items():
        for shards, spans in layout.regions(places):
            # The slices of two shards may begin at other rows, so that the ranks of one shard write for all.
            for ranks in min(shards, key=lambda groups: sum(load[lightest(ranks)] for ranks in groups)):
                share = packed(layout.blocks(places[ranks[0]], spans))
                total = numel(share)
                writers = ranks if total * dtype.itemsize >= _SPLIT else [lightest(ranks)]
                borders = [total * index // len(writers) for index in range(len(writers) + 1)]
                for rank, (start, stop) in zip(writers, pairwise(borders), strict=True):
                    if start < stop:
                        found[rank].setdefault(name, []).extend(between(share, start, stop))
                        load[rank] += (stop - start) * dtype.itemsize
    return [{name: packed(blocks) for name, blocks in share.items()} for share in found]
