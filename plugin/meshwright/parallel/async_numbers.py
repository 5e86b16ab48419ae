"""Gather numbers from every rank of an axis without making the host wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.parallel.collectives import Axis, all_gather


def is_deferred(device: torch.device) -> bool:
    """Return whether the host reads numbers from this device one step later instead of waiting for them."""
    return device.type != "cpu"


class Gathered:
    """Gathers the numbers of all ranks of an axis and starts to copy them to the host.

    Args:
        own: this rank's numbers, of the same shape on all ranks.
        axis: the axis of these ranks.
        step: the step in which the numbers were computed; used in messages.
    """

    def __init__(self, own: Tensor, axis: Axis, step: int):
        self.step = step
        gathered = all_gather(own[None], axis)
        self._event: torch.cuda.Event | None = None
        if gathered.is_cuda:
            self._host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            self._host.copy_(gathered, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = gathered

    def numbers(self) -> Tensor:
        """Return one row per rank. On CUDA, this waits only if the device has not begun the next step."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
