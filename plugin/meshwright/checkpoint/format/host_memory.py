"""The memory to which the tensors of a save in the background are copied."""

from __future__ import annotations

import torch
from torch import Tensor


class HostMemory:
    """Memory of one save at a time, which stays allocated between saves: new memory is several times slower."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return that many bytes, pinned where CUDA is in use; what the last call returned is overwritten."""
        if len(self._bytes) != num_bytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # frees the old bytes before it allocates new ones
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
        return self._bytes
