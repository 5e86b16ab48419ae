"""A bucket's segment on the host, where ``offload="optimizer"`` steps it, and the copies to the host and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class HostCopy:
    """What the host has of this rank's segment of a bucket.

    The copies to and from the device go through pinned memory, so that the host does not wait for them.

    Args:
        own: this rank's segment of the weights, on their device.
        dtype: the dtype in which the segment is stepped: float32 for weights in half precision.

    Attributes:
        master: the values that the optimizer steps.
        gradient: memory for the gradients of a step.
    """

    def __init__(self, own: Tensor, dtype: torch.dtype):
        self._own, self._is_async = own, own.is_cuda
        self._values = _pinned(own, own.dtype)
        self.master = self._values if dtype == own.dtype else torch.zeros(own.shape, dtype=dtype, device="cpu")
        self.gradient = _pinned(own, dtype)
        self.refresh()

    def fetch(self, gradients: Iterable[tuple[slice, Tensor]]) -> None:
        """Start to copy the weights and these gradients, each with its place in the segment, to the host."""
        self._values.copy_(self._own, non_blocking=self._is_async)
        for place, gradient in gradients:
            self.gradient[place].copy_(gradient.as_subclass(Tensor), non_blocking=self._is_async)

    def take_in(self) -> None:
        """Use what the program wrote into the weights since they were sent, once they have been fetched.

        Elements that it did not write keep the bits that only ``master`` has.
        """
        if self.master is self._values:
            return
        sent = self.master.to(self._values.dtype)
        if not torch.equal(self._values, sent):
            self.master.copy_(torch.where(self._values == sent, self.master, self._values.to(self.master.dtype)))

    def take_over(self) -> None:
        """Fetch the weights, wait for them, and use what the program wrote into them."""
        self._values.copy_(self._own)
        self.take_in()

    def refresh(self) -> None:
        """Use the weights, all of which were set from outside."""
        self._values.copy_(self._own)
        if self.master is not self._values:
            self.master.copy_(self._values)

    def send(self) -> None:
        """Start to copy the stepped values to the device."""
        if self.master is not self._values:
            self._values.copy_(self.master)
        self._own.copy_(self._values, non_blocking=self._is_async)


def on_host(option: object) -> object:
    """Return an option of an optimizer, such as a learning rate, with its tensors on the host."""
    if isinstance(option, Tensor):
        return option.cpu()
    if isinstance(option, list):
        return [on_host(part) for part in option]
    return tuple(on_host(part) for part in option) if isinstance(option, tuple) else option


def _pinned(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(like.shape, dtype=dtype, device="cpu", pin_memory=like.is_cuda)


class SideStream:
    """Runs copies from a device to the host beside what the device does next.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, copy: Callable[[], None]) -> Callable[[], None]:
        """Start copies of what the device has computed so far, and return a function that waits for them."""
        if self._stream is None:
            copy()
            return lambda: None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copy()
            copied = torch.cuda.Event()
            copied.record()
        return copied.synchronize
