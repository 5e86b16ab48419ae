"""Numbers on the device that the host reads later, without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class HostValues:
    """Starts to copy scalars to the host; on CPU they are there at once.

    Args:
        scalars: name -> a scalar tensor, a number, or None if it is unknown.
    """

    def __init__(self, scalars: Mapping[str, Tensor | float | None]) -> None:
        self._known = {name: value for name, value in scalars.items() if not isinstance(value, Tensor)}
        tensors = {name: value.detach() for name, value in scalars.items() if isinstance(value, Tensor)}
        self._names = list(tensors)
        self._event: Any = None
        if any(value.is_cuda for value in tensors.values()):
            flat = torch.stack([value.reshape(()).double() for value in tensors.values()])
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = torch.tensor([float(value) for value in tensors.values()], dtype=torch.float64)

    @property
    def is_ready(self) -> bool:
        """Whether the numbers have arrived."""
        return self._event is None or bool(self._event.query())

    def numbers(self) -> dict[str, float | None]:
        """Return the numbers; they are valid only after ``is_ready``."""
        copied = dict(zip(self._names, self._host.tolist(), strict=True))
        return {**{name: None if value is None else float(value) for name, value in self._known.items()}, **copied}
