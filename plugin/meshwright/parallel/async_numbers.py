"""Numbers of every rank of an axis, read without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.parallel.collectives import Axis, all_gather


def is_deferred(device: torch.device) -> bool:
    """Whether the host reads the device's numbers a step later, rather than waits for them."""
    return device.type != "cpu"


class Gathered:
    """The numbers of all ranks of an axis, on their way to the host.

    Args:
        own: this rank's, of one shape on all ranks.
        axis: the ranks.
        step: in which they were taken, for messages.
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
        """One row for each rank; on CUDA it is there without a wait once the device has begun the next step."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
