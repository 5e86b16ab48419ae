"""Tells of a program's own contrastive loss, which compares only the rows of one rank with each other.

In such a loss row i of one side belongs to row i of the other, so the labels of a cross-entropy over as many classes as
rows number the rows. Labels of classes do so by chance alone: once in ``rows ** rows`` batches.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from meshwright.mesh.axes import Axis

logger = logging.getLogger(__name__)

_ENOUGH = math.log(1e8)  # a program with labels of classes is told wrongly once in as many cases


class PairedRows:
    """Looks at the cross-entropies of the first backward passes, until it is known what their labels are.

    Args:
        dp: the axis whose ranks have different rows.
        is_told: whether this rank warns.
    """

    def __init__(self, dp: Axis, *, is_told: bool):
        self._dp = dp
        self._is_open = is_told and dp.size > 1
        self._evidence = 0.0

    def see(self, node: Any) -> None:
        """See the autograd node of a cross-entropy of a backward pass."""
        if not self._is_open or not node.name().startswith("NllLossBackward"):
            return
        labels, scores = node._saved_target, node._saved_self
        rows = len(labels) if labels.ndim else 0
        if rows == 1:  # which shows nothing, and a look at the label would wait for the device
            return
        if tuple(scores.shape) != (rows, rows) or not torch.equal(labels, torch.arange(rows, device=labels.device)):
            self._is_open = False
            return
        self._evidence += rows * math.log(rows)
        if self._evidence > _ENOUGH:
            self._is_open = False
            logger.warning(
                "the labels of the program's cross-entropy number the %d rows of this rank: such a loss compares the "
                "rows with each other, and each of the dp=%d ranks compares only its own, where one device compares "
                "all. For the loss of one device, compute it from the rows of all ranks: features = "
                "meshwright.gather_rows(features)",
                rows,
                self._dp.size,
            )
