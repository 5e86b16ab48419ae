"""Tells of a loop that cuts a loader's batch and takes a mean over each part.

::

    one device    rows 0 1 2 3 | 4 5 6 7      the mean of each half, and the average of both
    rank 0        rows 0 1 | 2 3              under dp=2 the first half is rows 0, 1, 4 and 5
    rank 1        rows 4 5 | 6 7

Other rows share a mean, so the average of the means differs where the parts count different numbers of items.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshwright.parallel.async_numbers import is_deferred, read_later
from meshwright.progress import is_first_rank

logger = logging.getLogger(__name__)


class BatchSlices:
    """Compares how many items the means over the parts of one batch count."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin anew, for a new model."""
        self._batch: object = None  # of which the last forward pass had some rows; None if it had all, or others
        self._compared: object = None  # the batch of the counts
        self._counts: list[Callable[[], Any]] = []
        self._has_told = False

    def enter_pass(self, batch: object) -> None:
        """Record that a forward pass has some rows of a batch; None if it has all, or those of no batch."""
        self._batch = batch

    def see(self, counts: Tensor) -> None:
        """See the counts of a mean over rows of several ranks, one row for each rank."""
        if self._batch is None or self._has_told or len(counts) == 1:
            return
        if self._batch is not self._compared:
            self._compare()
            self._compared, self._counts = self._batch, []
        self._counts.append(read_later(counts))
        if not is_deferred(counts.device):
            self._compare()

    def _compare(self) -> None:
        """Compare the parts of a batch. Those on a device are read when the next batch begins."""
        read = [count() for count in self._counts]
        first, other = read[:1], [count for count in read if count != read[0]][:1]
        self._has_told |= bool(other)
        if other and is_first_rank():
            logger.warning(
                "the program calls the model with parts of a loader's batch and takes a mean over each of them, of "
                "which the ranks count %s items, and then %s. Under data parallelism each part has rows of all ranks, "
                "so other rows share a mean than on one device, and the losses differ. Pass the whole batch to the "
                "model and cut it with ParallelPlan(gradient_accumulation_steps=2), or divide the sum over each part "
                "by the number of items of the whole batch: loss = meshwright.global_mean(model, sum_of_part / count, "
                "count), where count is that of this rank's rows of the whole batch",
                *(", ".join(f"{number:g}" for rank in counted for number in rank) for counted in (*first, *other)),
            )


slices = BatchSlices()  # of this process
