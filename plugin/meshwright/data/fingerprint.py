"""Computes a short text that identifies a dataset, for comparisons between ranks and with a saved state."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.data.nested import digest
from meshwright.faults.memory_digest import is_plain

ROWS_READ = 16

_first_seen = WeakIdKeyDictionary()  # the result of the first call of _held for each dataset


def outline(dataset: Sequence[object]) -> str:
    """Return the class of a dataset and, if it has one, its length."""
    try:
        return f"{type(dataset).__name__} of {len(dataset)}"
    except Exception:  # the dataset has no length, or none yet
        return type(dataset).__name__


def fingerprint(dataset: Any, *, has_numbers: bool = False) -> str:
    """Return a text that identifies a dataset, computed from a few of its rows and without running the user's code.

    The text describes:

    - for a dataset with a ``fingerprint`` attribute: only this attribute.
    - for a Hugging Face dataset: its columns and some rows. The dataset's own fingerprint changes with the files'
      dates and, after some transforms, at random.
    - for a Subset: its indices, and the fingerprint of its dataset. For a list: some of its items.
    - for any other class: some rows of each attribute that holds data (tensors, arrays, lists, data frames, other
      datasets and dicts of them). No sample is requested.

    Args:
        dataset: a dataset of any class.
        has_numbers: whether to include attributes that are integers. Within a run these are equal on all ranks, unless
            each rank has a part of the data. In another run they may differ, as the number of an epoch does.

    Example:
        >>> fingerprint(range(3)) == fingerprint(range(3)) != fingerprint(range(1, 4))
        True
    """
    if isinstance(said := getattr(dataset, "fingerprint", None), str):
        return said
    text = outline(dataset)
    if isinstance(dataset, Subset):
        inner = fingerprint(dataset.dataset, has_numbers=has_numbers)
        return f"{text}, indices {_short(list(dataset.indices))} of ({inner})"
    if isinstance(dataset, ConcatDataset):
        return f"{text}: {_short([fingerprint(part, has_numbers=has_numbers) for part in dataset.datasets])}"
    if _is_of_hugging_face(dataset):
        rows = dataset.with_format("arrow")[_some(len(dataset))] if len(dataset) else None
        return f"{text}, columns {dataset.column_names}, rows {_short(rows and rows.to_pydict())}"
    if isinstance(dataset, list | tuple | range):
        return f"{text}, rows {_code(dataset)}"
    held = {name: value for name, value in _held(dataset).items() if has_numbers or isinstance(value, str)}
    return ", ".join([text, *(f"{name}={value}" for name, value in held.items())])


def _held(dataset: object) -> dict[str, Any]:
    """Return a dataset's attributes: digests of those that hold data, and the values of those that are integers.

    Later calls for a dataset return the result of the first call, since a dataset may cache and count what is read.
    """
    try:
        if dataset in _first_seen:
            seen: dict[str, Any] = _first_seen[dataset]
            return seen
        held = _first_seen[dataset] = {}  # stored first, since datasets may refer to each other in a cycle
    except TypeError:  # the object allows no weak references
        held = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        # A bool cannot be the index of this rank's part of the data.
        if isinstance(value, int) and not isinstance(value, bool):
            held[name] = value
        elif (data := _data_of(value)) is not None:
            held[name] = _code(data)
    return held


def _data_of(value: object) -> Any:
    """Return an attribute that holds data, or else None. For a dict, return only the entries with data."""
    if isinstance(value, Mapping):
        columns = {key: _data_of(column) for key, column in value.items()}
        return {key: column for key, column in columns.items() if column is not None} or None
    return value if _is_data(value) else None


def _is_data(value: object) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0
    is_frame = hasattr(type(value), "iloc")
    return is_frame or isinstance(value, list | tuple | range | Dataset) or _is_of_hugging_face(value)


def _is_of_hugging_face(value: object) -> bool:
    return hasattr(type(value), "with_format") and hasattr(value, "_fingerprint")


def _code(value: object) -> str:
    return f"{digest(_sampled(value)):08x}"


def _sampled(value: Any) -> Any:
    """Return the size and some rows of a value, recursively."""
    if isinstance(value, Tensor) and (not is_plain(value) or value.is_meta):
        return str(value.layout), str(value.dtype)
    if isinstance(value, Tensor | np.ndarray) and value.ndim:
        rows = value[_some(len(value))]
        has_texts = isinstance(rows, np.ndarray) and (rows.dtype.hasobject or rows.dtype.kind == "U")
        return list(value.shape), _sampled(rows.tolist()) if has_texts else rows
    if hasattr(type(value), "iloc"):
        return list(value.shape), _sampled(value.iloc[_some(len(value))].to_numpy())
    if isinstance(value, list | tuple | range):
        return len(value), [_sampled(value[index]) for index in _some(len(value))]
    if isinstance(value, Mapping):
        keys = list(value)
        return len(keys), {keys[index]: _sampled(value[keys[index]]) for index in _some(len(keys))}
    if isinstance(value, str | os.PathLike):
        return os.path.basename(value)  # the directory may differ between machines
    return fingerprint(value) if _is_data(value) else value


def _some(size: int) -> list[int]:
    """Return up to ROWS_READ indices, including the first and the last."""
    return sorted({round(i * (size - 1) / (ROWS_READ - 1)) for i in range(ROWS_READ)}) if size else []


def _short(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=6).hexdigest()
