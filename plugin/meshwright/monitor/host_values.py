"""Numbers on the device that the host reads later, without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class HostValues:
    """Starts to copy scalars to the host; on CPU they are there at once.

    Args:
        scalars: name -> a scalar tensor, a number, or None if it is unknown.
    """

    def __init__(self, scalars: Mapping[str, Tensor | float | None]) -> None:
        on_device = {name: x.detach() for name, x in scalars.items() if isinstance(x, Tensor) and x.is_cuda}
        # Copied now, since the program may change a learning rate that is a tensor.
        self._known = {name: None if x is None else float(x) for name, x in scalars.items() if name not in on_device}
        self._names = list(on_device)
        self._event: torch.Event | None = None
        if on_device:
            flat = torch.stack([value.reshape(()).double() for value in on_device.values()])
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_ready(self) -> bool:
        """Whether the numbers have arrived."""
        return self._event is None or bool(self._event.query())

    def numbers(self) -> dict[str, float | None]:
        """Return the numbers; they are valid only after ``is_ready``."""
        if not self._names:
            return self._known
        return {**self._known, **dict(zip(self._names, self._host.tolist(), strict=True))}
