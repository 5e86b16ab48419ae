"""Tells of an input that has as many entries as a batch has rows by chance, such as weights of classes.

::

    batch 1    x [4, 8]   y 2 0 1 3   weights 0.1 0.2 0.3 0.4
    batch 2    x [4, 8]   y 1 1 0 2   weights 0.1 0.2 0.3 0.4    the same numbers for other rows

No shape tells such an input from one with a number for each row, and it is cut by rows.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from meshwright.faults.memory_digest import has_values, is_plain
from meshwright.parallel.batch.items import kind_of
from meshwright.parallel.batch.mean_over_ranks import TARGETS
from meshwright.parallel.batch.schema import PER_TOKEN, TOKENS, BatchSchema
from meshwright.progress import is_first_rank

logger = logging.getLogger(__name__)

_ENOUGH = math.log(1e8)  # an input of rows is told wrongly once in as many cases, if its values are drawn at random
_MOST = 16  # batches that are looked at


class FixedInputs:
    """Looks at the first batches, until each input has changed.

    Real numbers are looked at alone: labels of classes, masks and positions are often the same in several batches.

    Args:
        parts: what gets the parts of a batch, as the beginning of a sentence.
    """

    def __init__(self, parts: str):
        self._parts = parts
        self._left = _MOST
        self._before: dict[str, tuple[Tensor, Tensor]] | None = None  # the tensors of the last batch, and their values
        self._starts: dict[str, Tensor] = {}  # the first values of the first batch's tensors
        self._evidence: dict[str, float] = {}

    def see(self, schema: BatchSchema) -> None:
        """Look at a batch that is about to be cut by rows."""
        if self._left == 0 or not all(is_plain(x) and has_values(x) for x in schema.tensors.values()):
            return
        self._left -= 1
        known = (*TOKENS, *TARGETS, *PER_TOKEN, *schema.format.dims)
        found = {
            name: x
            for name, x in schema.tensors.items()
            if x.is_floating_point() and name not in known and kind_of(name) is None and len(x) == schema.rows > 1
        }
        if (before := self._before) is None:
            self._before = {name: (x, x.detach().clone()) for name, x in found.items()}
            self._starts = {name: _start(x) for name, x in schema.tensors.items()}
        else:
            same = {name for name, (_, values) in before.items() if name in found and _is_same(found[name], values)}
            others = ((x, self._starts.get(name)) for name, x in schema.tensors.items() if name not in same)
            if any(start is not None and not _is_same(_start(x), start) for x, start in others):
                told = {name for name in same if self._is_shown(name, found[name], before[name][0])}
                for name in told:
                    self._tell(name, schema.rows)
                self._before = {name: (found[name], before[name][1]) for name in same - told}
        self._left = self._left if self._before else 0

    def _is_shown(self, name: str, x: Tensor, before: Tensor) -> bool:
        """Return whether it is beyond chance that an input is the same for other rows."""
        distinct = len(torch.unique(x, dim=0))
        self._evidence[name] = self._evidence.get(name, 0.0) + len(x) * math.log(distinct)
        return (x is before and distinct > 1) or self._evidence[name] > _ENOUGH

    def _tell(self, name: str, rows: int) -> None:
        if is_first_rank():
            logger.warning(
                "%s has %d entries, as many as the batch has rows, and the same values in each batch, though other "
                "inputs change. %s gets the entries of its own rows alone, which is wrong if each row needs all of "
                "them, such as the weights of classes. Say which it is: ToDistributedConfig(batch_dims={%r: None}) if "
                "each row needs all entries, or {%r: 0} if each row has one",
                name,
                rows,
                self._parts,
                name,
                name,
            )


def _start(x: Tensor) -> Tensor:
    return x.detach().flatten()[:64].clone()


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
