"""Know which rows of a process's batches are fillers, and whether a forward pass has all rows of its batch.

If a batch has fewer rows than there are data-parallel ranks, the loader gives a rank without rows a filler: a row of
the batch whose labels no loss counts. This module recognises the filler wherever it is used, by its tensors.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from meshwright.parallel.mean_over_ranks import without_targets

_KEPT = 8  # fillers that loaders have yielded; more than one if a program reads several loaders at a time


class _Batches:
    def __init__(self) -> None:
        self.fillers: deque[list[Tensor]] = deque(maxlen=_KEPT)  # the tensors themselves, so that no id is used again
        self.last_is_filler = False  # of the batches that loaders have yielded
        self.pass_has_filler: bool | None = None  # the last forward pass since then; None before it
        self.is_cut = False  # whether a forward pass runs for one of several micro-batches


_batches = _Batches()


def yielded(tensors: Iterable[Tensor], *, is_filler: bool) -> None:
    """Record that a loader is about to yield a batch of these tensors."""
    _batches.last_is_filler, _batches.pass_has_filler = is_filler, None
    if is_filler:
        _batches.fillers.append(list(tensors))


def blank_fillers(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments; the targets of a filler have the ``ignore_index`` of the call, if it has one."""
    if not _batches.fillers or kwargs.get("ignore_index") is None or not any(map(is_filler, kwargs.values())):
        return kwargs
    blanked = without_targets(kwargs)
    _batches.fillers[-1] += [x for x in blanked.values() if isinstance(x, Tensor)]
    return blanked


def entered(inputs: Iterable[Any]) -> None:
    """Record that a forward pass begins with these inputs."""
    _batches.pass_has_filler = any(map(is_filler, inputs)) if _batches.fillers else False


def is_filler(x: Any) -> bool:
    """Return whether an object is a tensor of a filler."""
    return any(x is other for filler in _batches.fillers for other in filler)


def has_filler_rows(x: Tensor) -> bool:
    """Return whether a tensor, computed from the last batch or pass, has a filler's row.

    Raises:
        ValueError: if the last batch is a filler, but the last forward pass had other inputs.
    """
    if is_filler(x) or _batches.pass_has_filler is None:
        return is_filler(x) or _batches.last_is_filler
    if _batches.last_is_filler and not _batches.pass_has_filler and len(x) > 0:
        raise ValueError(
            "the last batch has fewer rows than there are data-parallel ranks, so this rank got a row that only keeps "
            "it in step and must not count, but the model was called with other tensors than those of the batch. Call "
            "the model with the batch's own tensors, or set drop_last=True on the loader"
        )
    return _batches.pass_has_filler


@contextlib.contextmanager
def cut() -> Iterator[None]:
    """Say that the forward passes inside the context have some of the rows of their batch."""
    before, _batches.is_cut = _batches.is_cut, True
    try:
        yield
    finally:
        _batches.is_cut = before


def are_cut() -> bool:
    """Return whether the running forward pass has some of the rows of its batch."""
    return _batches.is_cut
