"""Says of a batch that a loader has yielded which part of the global batch it is, for the checks of a loss."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.parallel.mean_over_ranks import TARGETS, valid_labels

# Kept beside the tensors, since a program passes tensors to its model and a loader does not know the model.
_SHARES: Any = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class BatchShare:
    """One rank's rows of a global batch.

    Args:
        total: the number of rows of the global batch.
        held: the number of this rank's rows.
        counted: how many of them count: all, or 0 if they only keep the rank in step with the others.
        tensors: for each tensor at the top level of the rank's batch, its name and a function that returns it, or None
            if the program no longer has it.
    """

    total: int
    held: int
    counted: int
    tensors: tuple[tuple[Any, Callable[[], Tensor | None]], ...]

    @classmethod
    def keep(cls, batch: Any, total: int, held: int, counted: int) -> BatchShare:
        """Return the share of a batch, which :meth:`of` finds again by each of the batch's tensors."""
        items = (
            batch.items() if isinstance(batch, Mapping) else enumerate(batch if isinstance(batch, list | tuple) else ())
        )
        tensors = [(name, x) for name, x in items if type(x) is Tensor]
        share = cls(total, held, counted, tuple((name, weakref.ref(x)) for name, x in tensors))
        for _, x in tensors:
            _SHARES[x] = share
        return share

    @staticmethod
    def of(inputs: Iterable[Any]) -> BatchShare | None:
        """Return the share that a model's inputs are from, if one of them is a loader's tensor or a view of one."""
        for x in inputs:
            if isinstance(x, Tensor):
                for tensor in (x, x._base):
                    if tensor is not None and (share := _SHARES.get(tensor)) is not None:
                        return share  # type: ignore[no-any-return]
        return None

    def count_labels(self, inputs: Iterable[Any]) -> Tensor | None:
        """Return how many labels count that the program has and does not pass to its model; None if it has none.

        Without the usual names, labels are all integers that are no inputs.
        """
        passed = {id(x) for x in inputs} | {id(x._base) for x in inputs if isinstance(x, Tensor)}
        held = {name: x for name, find in self.tensors if (x := find()) is not None and id(x) not in passed}
        named = [x for name, x in held.items() if name in TARGETS]
        labels = named or [x for x in held.values() if x.dtype is torch.int64]
        return torch.stack([valid_labels(x) for x in labels]).sum() if labels else None
