"""Gather numbers from every rank of an axis without making the host wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import all_gather


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
        self._copied = _copy_to_host(all_gather(own[None], axis))

    def numbers(self) -> Tensor:
        """Return one row per rank. On CUDA, this waits only if the device has not begun the next step."""
        return self._copied()


def read_later(x: Tensor) -> Callable[[], Any]:
    """Start to copy a tensor to the host. The returned function returns its values, one step later without a wait."""
    copied = _copy_to_host(x)
    return lambda: copied().tolist()


def _copy_to_host(x: Tensor) -> Callable[[], Tensor]:
    if not x.is_cuda:
        return lambda: x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait
