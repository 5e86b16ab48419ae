"""Warn once if a program pads on the left, in its training loop, to the longest of one rank's rows.

A loader gives the batches of its collate function one length over the ranks. It cannot do so for rows that the program
pads itself, so the lengths are compared in the first training passes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.faults.guard import Guard
from meshwright.mesh.axes import Axis
from meshwright.parallel.async_numbers import read_later
from meshwright.parallel.batch.mean_over_ranks import IGNORE_INDEX
from meshwright.parallel.batch.share import BatchShare
from meshwright.parallel.collectives import all_gather

logger = logging.getLogger(__name__)

_FIRST = 3  # passes


class PaddedRows:
    """Compares over dp the lengths of rows that are no tensors of a loader.

    Args:
        dp: the axis over which the batch is split.
        guard: the guard, by which the ranks compare their lengths without waiting for a device.
    """

    def __init__(self, dp: Axis, guard: Guard | None):
        self._dp, self._guard = dp, guard
        self._passes = 0
        self._has_warned = False

    def look(self, inputs: Mapping[str, object]) -> None:
        """Compare the ranks; in the first passes, all of them make this call."""
        self._passes += 1
        if self._passes > _FIRST or self._guard is None or not self._guard.is_current:
            return
        mask, labels = inputs.get("attention_mask"), inputs["labels"]
        length = 0
        if type(mask) is Tensor and type(labels) is Tensor and mask.ndim == 2 and mask.shape == labels.shape:
            length = mask.shape[1] if BatchShare.of(inputs.values()) is None else 0
        if self._guard.agree("length of the rows", str(length), group=self._dp.group):
            return
        own = torch.full((1, 3), length, dtype=torch.long, device=getattr(labels, "device", None))
        if isinstance(mask, Tensor) and isinstance(labels, Tensor) and length:
            is_first = mask[:, 0].to(labels.device) != 0
            own[0, 1] = (~is_first).any()
            own[0, 2] = (is_first & (labels[:, 0] != IGNORE_INDEX)).any()
        ranks = read_later(all_gather(own, self._dp))()
        most = max(n for n, *_ in ranks)
        # Behind padding, the first token of such a rank's row is a label that one device counts.
        misses = [rank for rank, (n, _, begins) in enumerate(ranks) if 0 < n < most and begins]
        is_left = any(has_padding for n, has_padding, _ in ranks if n)
        if is_left and misses[:1] == [self._dp.rank] and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the program pads on the left, and this rank's rows have length %d while another data-parallel rank's "
                "rows of the same batch have length %d. One device pads all rows to the longest one, and the first "
                "token after padding is a label, so the loss differs from that of one device. Pad in the loader, "
                "DataLoader(dataset, collate_fn=...), whose batches get one length over the ranks, or pad all batches "
                "to one length, tokenizer.pad(rows, padding='max_length', max_length=N)",
                length,
                most,
            )
