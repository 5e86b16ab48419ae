"""A short text by which a dataset is known again: on another rank, or when training goes on."""

from __future__ import annotations

import hashlib
from typing import Any

from torch.utils.data import ConcatDataset, Subset, TensorDataset

from meshwright.data.tree import digest

ROWS_READ = 16


def fingerprint(dataset: Any) -> str:
    """What tells a dataset from others, from as little of it as can be had without running the user's code.

    A dataset with a ``fingerprint`` of its own says it itself. Of one of Hugging Face the columns and some rows
    are read: its own fingerprint changes with the files' dates and, after some transforms, at random. Of a subset
    the indices count, of tensors some rows; of anything else the class and the length.

    Example:
        >>> fingerprint([5, 6, 7])
        'list of 3'
    """
    if isinstance(said := getattr(dataset, "fingerprint", None), str):
        return said
    name = type(dataset).__name__
    text = f"{name} of {len(dataset)}" if hasattr(dataset, "__len__") else name
    if isinstance(dataset, Subset):
        return f"{text}, indices {_short(list(dataset.indices))} of ({fingerprint(dataset.dataset)})"
    if isinstance(dataset, ConcatDataset):
        return f"{text}: {_short([fingerprint(part) for part in dataset.datasets])}"
    if isinstance(dataset, TensorDataset):
        return f"{text}, rows {digest([x[_some(len(x))] for x in dataset.tensors]):08x}"
    if hasattr(dataset, "_fingerprint") and hasattr(dataset, "with_format"):
        rows = dataset.with_format("arrow")[_some(len(dataset))] if len(dataset) else None
        return f"{text}, columns {dataset.column_names}, rows {_short(rows and rows.to_pydict())}"
    return text


def _some(size: int) -> list[int]:
    """Some indices, the first and the last among them."""
    return sorted({round(i * (size - 1) / (ROWS_READ - 1)) for i in range(ROWS_READ)}) if size else []


def _short(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=6).hexdigest()
