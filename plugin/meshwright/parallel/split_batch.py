"""Split the arguments of a forward call into those of its micro-batches."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import PlanError
from meshwright.parallel.mean_over_ranks import without_targets


def split_batch(batch: dict[str, Any], rows: int, count: int) -> list[dict[str, Any]]:
    """Split the arguments of a forward call by rows. A piece without rows gets one row that no loss counts.

    Tensors are split along the dim of the rows::

        [rows, ...]               tokens, labels, one image per row
        [3 or 4, rows, tokens]    positions in time, height and width
        [patches, ...]            patches of one image per row, beside the images' sizes [rows, 3] in patches

    Values without rows, such as numbers, vectors and tensors of one row, go into each piece.

    Args:
        batch: the arguments by name.
        rows: the number of rows of the batch.
        count: the number of pieces.

    Raises:
        PlanError: if a tensor has something else than rows, so that its part of each micro-batch is unknown.
    """
    if count == 1 and rows:
        return [dict(batch)]
    ends = {name: _ends(name, value, batch, rows) for name, value in batch.items() if isinstance(value, Tensor)}
    pieces = []
    for low, high in pairwise(index * rows // count for index in range(count + 1)):
        piece = dict(batch)
        for name, (dim, borders) in ((name, found) for name, found in ends.items() if found is not None):
            start, stop = borders[low], borders[min(max(high, low + 1), rows)]
            piece[name] = batch[name].narrow(dim, start, stop - start)
        pieces.append(without_targets(piece) if low == high else piece)
    return pieces


def _ends(name: str, x: Tensor, batch: dict[str, Any], rows: int) -> tuple[int, list[int]] | None:
    """Return the dim of a tensor that has the rows, and where each row begins and ends in it; None without rows."""
    each = list(range(rows + 1))
    if x.is_floating_point() and x.ndim > 1 and (patches := _patches_of_rows(x, batch, rows)) is not None:
        return 0, patches
    is_of_tokens = x.ndim == 3 and not x.is_floating_point() and x.shape[1:] == _tokens_shape(batch)
    if is_of_tokens and (x.shape[0] != rows or name == "position_ids"):
        return 1, each
    if x.ndim and x.shape[0] == rows:
        return 0, each
    if x.ndim < 2 or x.shape[0] == 1:
        return None
    raise PlanError(
        f"{name} has shape {tuple(x.shape)} in a batch of {rows} rows, so it is not known which part of it belongs to "
        "which micro-batch. Give each row one image, or set ParallelPlan(gradient_accumulation_steps=1, "
        "micro_batch_size=None)"
    )


def _tokens_shape(batch: dict[str, Any]) -> torch.Size | None:
    tokens = next((x for n in ("input_ids", "inputs_embeds") if isinstance(x := batch.get(n), Tensor)), None)
    return None if tokens is None else tokens.shape[:2]


def _patches_of_rows(x: Tensor, batch: dict[str, Any], rows: int) -> list[int] | None:
    """Return where the patches of each row begin and end, if the batch has the sizes of one image per row."""
    for sizes in batch.values():
        is_sizes = isinstance(sizes, Tensor) and sizes.ndim == 2 and sizes.shape[1] == 3 and _counts(sizes)
        if is_sizes and sizes.shape[0] == rows and x.shape[0] != rows:
            borders = [0, *accumulate(sizes.prod(-1).tolist())]
            if borders[-1] == x.shape[0]:
                return borders
    return None


def _counts(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)
