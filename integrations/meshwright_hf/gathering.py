"""Gathers the rows of all data-parallel ranks for metrics: each row once, in the order of the dataset."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from meshwright.data.nested import map_tensors, tensors_of
from meshwright.data.stream import gather_objects
from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import all_gather


def gather_tensors(data: object, dp: Axis, *, is_blank: bool = False, rows: int | None = None) -> Any:
    """Return each tensor with its rows gathered over the data-parallel axis; every rank makes the call.

    The ranks may have different numbers of rows. A tensor without dims becomes a vector with one number per rank.

    Args:
        data: a tensor, or nested containers of tensors, with the same structure on all ranks.
        dp: the data-parallel axis, whose ranks have different rows.
        is_blank: whether this rank's rows are a copy that does not count, because the batch has no row for this rank.
        rows: the number of rows to keep from the gathered rows; None for all.

    Raises:
        ValueError: on all ranks, if tensors differ between ranks in more than their number of rows.
    """
    own = list(tensors_of(data))
    if dp.size == 1:
        return map_tensors(data, lambda x: x[None] if x.ndim == 0 else x[:rows])
    forms = gather_objects([(str(x.dtype), tuple(x.shape), is_blank) for x in own], dp)
    if len({len(ranks) for ranks in forms}) > 1:
        raise ValueError(f"the ranks gather different numbers of tensors: {', '.join(str(len(r)) for r in forms)}")
    gathered = [_join(x, list(ranks), dp, rows) for x, *ranks in zip(own, *forms, strict=True)]
    joined = iter(gathered)
    return map_tensors(data, lambda _: next(joined))


def gather_values(data: Iterable[object], dp: Axis, *, is_blank: bool = False, rows: int | None = None) -> list[Any]:
    """Return the lists of all data-parallel ranks as one list; the items must be picklable. See ``gather_tensors``."""
    ranks = gather_objects([] if is_blank else list(data), dp)
    return [value for values in ranks for value in values][:rows]


def has_only_tensors(data: object) -> bool:
    """Return whether nested containers hold only tensors."""
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _join(x: Tensor, forms: list[tuple[str, tuple[int, ...], bool]], dp: Axis, rows: int | None) -> Tensor:
    if len({(dtype, shape[1:], len(shape)) for dtype, shape, _ in forms}) > 1:
        said = "; ".join(f"{dtype} {list(shape)} on rank {rank} of dp" for rank, (dtype, shape, _) in enumerate(forms))
        raise ValueError(
            f"tensors to gather may differ in their rows only, but there are {said}; pad them first, with "
            "accelerator.pad_across_processes(tensor, dim=1, pad_index=...)"
        )
    if x.ndim == 0:
        return all_gather(x.detach()[None], dp)
    most = max(shape[0] for _, shape, _ in forms)
    padded = x.new_zeros((most, *x.shape[1:]))
    padded[: x.shape[0]] = x
    parts = all_gather(padded.detach(), dp).split(most)
    kept = [part[: 0 if is_blank else shape[0]] for part, (_, shape, is_blank) in zip(parts, forms, strict=True)]
    return torch.cat(kept)[:rows]
