"""Tracks the bytes of the live tensors, and their peak, at every operation."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations allocate inside this context, until the storages are freed.

    Works on fake and real tensors, on any device. It does not count an operation's temporary memory, nor what an
    allocator adds.

    Args:
        tensors: the tensors that exist before the context begins; each storage is counted once.

    Example:
        >>> with LiveBytes([]) as memory:
        ...     x = torch.ones(1000) + 1  # the ones are gone by now
        >>> memory.now, memory.peak
        (4000, 8000)
    """

    def __init__(self, tensors: Iterable[Tensor] = ()):
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted already."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key, size)

    def restart_peak(self) -> None:
        """Restart the peak from the current value."""
        self.peak = self.now

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self.add(leaf)
        return result
