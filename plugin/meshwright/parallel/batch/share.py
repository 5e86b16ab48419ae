"""Says of each batch that a loader has yielded what was whole and what was cut, for the checks of losses.

global batch   5 rows         3 rows over 4 ranks           a batch with micro-batches
rank 0         rows 0-1       row 0        counted 0        rows 0-1, then rows 2-3: cut
rank 1         rows 2-4       row 0        counted 1
ranks 2, 3                    rows 1 and 2 counted 1        rank 0 has a filler, which only keeps it in step
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.faults.statement import Statement
from meshwright.mesh.axes import Axis
from meshwright.parallel.batch.mean_over_ranks import TARGETS, slices, valid_labels, without_targets
from meshwright.temporarily import temporarily


@dataclass(frozen=True)
class BatchShare:
    """One rank's rows of a global batch.

    Args:
        total: the number of rows of the global batch.
        held: the number of this rank's rows.
        counted: how many of them count: all, or 0 if they only keep the rank in step with the others.
        tensors: for each tensor at the top level of the rank's batch, its name and a function that returns it, or None
            if the program no longer has it.
        targets: the values of the labels that have one of the usual names, for a program that makes copies of them.
        number: its place among the batches of the loader's running iteration.
    """

    total: int
    held: int
    counted: int
    tensors: tuple[tuple[object, Callable[[], Tensor | None]], ...]
    targets: tuple[Tensor, ...] = ()
    number: int = 0

    @property
    def is_filler(self) -> bool:
        return self.counted == 0

    @classmethod
    def keep(
        cls, batch: object, tensors: Iterable[Tensor], total: int, held: int, counted: int, number: int = 0
    ) -> BatchShare:
        """Return the share of a batch, which :meth:`of` finds again by each of the batch's tensors."""
        items = (
            batch.items() if isinstance(batch, Mapping) else enumerate(batch if isinstance(batch, list | tuple) else ())
        )
        found = [(name, x) for name, x in items if type(x) is Tensor]
        named = [(name, weakref.ref(x)) for name, x in found]
        targets = tuple(x.data for name, x in found if name in TARGETS)
        share = cls(total, held, counted, tuple(named), targets, number)
        for x in tensors:
            if type(x) is Tensor:
                _process.shares[x] = share
        return share

    @staticmethod
    def of(inputs: Iterable[object]) -> BatchShare | None:
        """Return the share that a model's inputs are from, if one of them is a loader's tensor or a view of one."""
        for x in inputs:
            if type(x) is Tensor:  # reading an attribute of a subclass may run code of its own
                for tensor in (x, x._base):
                    if tensor is not None and (share := _process.shares.get(tensor)) is not None:
                        return share
        return None

    def count_labels(self, inputs: Iterable[object]) -> Tensor | None:
        """Return how many labels count that the program has and does not pass to its model; None if it has none.

        Without the usual names, labels are all integers that are no inputs. Without those, masks say what counts.
        """
        passed = {id(x) for x in inputs} | {id(x._base) for x in inputs if type(x) is Tensor}
        held = {name: x for name, find in self.tensors if (x := find()) is not None and id(x) not in passed}
        masks = [x for name, x in held.items() if isinstance(name, str) and "mask" in name]
        named = [x for name, x in held.items() if name in TARGETS]
        labels = named or [x for x in held.values() if x.dtype is torch.int64 and not any(x is y for y in masks)]
        counts = [valid_labels(x) for x in labels] or [x.sum() for x in masks]
        return torch.stack(counts).sum() if counts else None


class _Process:
    """What the loaders and models of this process did last. A program passes tensors to its model, and no loader."""

    def __init__(self) -> None:
        self.shares: MutableMapping[Tensor, BatchShare] = WeakTensorKeyDictionary()
        self.yielded: BatchShare | None = None  # of the last batch
        self.passed: BatchShare | None = None  # of the inputs of the last forward pass
        self.has_passed = False  # whether a forward pass has begun since the last batch
        self.is_cut = False  # whether a forward pass runs for one of several micro-batches
        self.is_filler = False  # whether this micro-batch has no row but one that keeps the rank in step


_process = _Process()


def yield_next(share: BatchShare | None) -> None:
    """Record that the program gets this batch next, or that what it computes next is of no batch.

    A wrapper of a loader that reads ahead makes the call again.
    """
    _process.yielded, _process.passed, _process.has_passed = share, None, False
    slices.enter_pass(None)


def taken() -> Statement | None:
    """Return a statement of which batch the program has taken last; None if what it computes is of no batch."""
    if _process.yielded is None:
        return None
    number = str(_process.yielded.number)
    return Statement(
        text=f"batch {number} of the loader",
        details=lambda: {"the batch of the loader": number},
        advice="A program that skips a batch on some ranks alone trains them on different batches: skip it on all",
    )


def enter_pass(inputs: Iterable[object]) -> None:
    """Record that a forward pass begins with these inputs."""
    inputs = list(inputs)
    _process.passed, _process.has_passed = BatchShare.of(inputs), True
    slices.enter_pass(_process.passed if any(map(_is_part, inputs)) else None)


def _is_part(x: object) -> bool:
    """Return whether a tensor has some of the rows of a loader's tensor, one after the other."""
    if type(x) is not Tensor or (base := x._base) is None or base not in _process.shares:
        return False
    return x.ndim == base.ndim > 0 and len(x) < len(base) and x.shape[1:] == base.shape[1:]


def labels_beside(inputs: Iterable[object]) -> Tensor | None:
    """Return how many labels count that a program has beside these inputs of its model; None if that is unknown.

    A program that copies its batch, for example to another device, copies the labels too.
    """
    inputs = list(inputs)
    if (share := BatchShare.of(inputs)) is not None:
        return share.count_labels(inputs)
    targets = () if _process.yielded is None else _process.yielded.targets
    return torch.stack([valid_labels(x) for x in targets]).sum() if targets else None


def without_fillers_targets(kwargs: dict[str, object]) -> dict[str, object]:
    """Return a call's arguments; the targets of a filler have the ``ignore_index`` of the call, if it has one."""
    share = None if kwargs.get("ignore_index") is None else BatchShare.of(kwargs.values())
    if share is None or not share.is_filler:
        return kwargs
    blanked = without_targets(kwargs)
    for name in TARGETS:
        if isinstance(x := blanked.get(name), Tensor):
            _process.shares[x] = share
    return blanked


def share_of(inputs: Iterable[object]) -> BatchShare | None:
    """Return the share that inputs of a model, or the batch that they are copies of, have of a global batch."""
    return BatchShare.of(inputs) or _process.yielded


def first_row(dp: Axis, held: int, total: int) -> int:
    """Return the first of the rows that the loader gives a rank of dp: as many as others, or one fewer."""
    return min(dp.rank * total // dp.size, total - held)  # a filler is a copy of a row that another rank has


def runs_filler(inputs: Iterable[object]) -> bool:
    """Return whether inputs of a model, or the batch that they are copies of, only keep this rank in step."""
    share = share_of(inputs)
    return _process.is_filler or (share is not None and share.is_filler)


def is_in_filler() -> bool:
    """Return whether what runs now, forward or backward, is of rows that only keep this rank in step."""
    return _process.is_filler or (_process.passed is not None and _process.passed.is_filler)


def has_filler_rows(x: Tensor) -> bool:
    """Return whether a tensor, computed from the last batch or pass, has a filler's row.

    Raises:
        ValueError: if the last batch is a filler, but the last forward pass had other inputs.
    """
    if (share := BatchShare.of([x])) is not None:
        return share.is_filler
    last, passed = _process.yielded, _process.passed
    if not _process.has_passed:
        return last is not None and last.is_filler
    if last is not None and last.is_filler and passed is None and len(x) > 0:
        raise ValueError(
            "the last batch has fewer rows than there are data-parallel ranks, so this rank got a row that only keeps "
            "it in step and must not count, but the model was called with other tensors than those of the batch. Call "
            "the model with the batch's own tensors, or set drop_last=True on the loader"
        )
    return passed is not None and passed.is_filler


def cut(*, is_filler: bool = False) -> contextlib.AbstractContextManager[None]:
    """Say that the passes inside the context have some of the rows of their batch, or a filler alone."""
    return temporarily(_process, is_cut=True, is_filler=is_filler)


def are_cut() -> bool:
    """Return whether the running forward pass has some of the rows of its batch."""
    return _process.is_cut
