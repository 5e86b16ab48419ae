"""Copies what a rank writes, as of one moment, in a thread while training goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from meshwright.checkpoint.format.part_files import RankPart, Source
from meshwright.layout.blocks import numel


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


class Snapshot:
    """The values of a rank's part as they are when the snapshot is made.

    Until :meth:`copy` has copied a CPU tensor, the snapshot shares its memory by torch's copy-on-write: whoever writes
    to the tensor first, also through ``.data`` or a view, writes to new memory. Tensors on other devices are copied at
    once, and so is memory that torch cannot share (of files, of other processes, of NumPy).

    Args:
        part: what the rank writes.
        memory: the memory for the copies.
    """

    def __init__(self, part: RankPart, memory: HostMemory):
        self._pending: deque[tuple[Source, Tensor]] = deque()
        self._error: Exception | None = None
        targets = _targets(part, memory)
        devices: set[torch.device] = set()
        for key, source in part.sources.items():
            values = source.flat()
            devices |= set() if values.is_cpu else {values.device}
            shared = _shared(values) if values.is_cpu else None
            if shared is None:
                source.copy_to(targets[key])
            else:
                self._pending.append((replace(source, values=partial(_same, shared)), targets[key]))
        for device in devices:
            torch.accelerator.synchronize(device)  # the copies are asynchronous
        sources = {key: _copied(source, targets[key]) for key, source in part.sources.items()}
        self._part = replace(part, sources=sources)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of tensors."""
        return self._part.num_bytes

    def copy(self) -> None:
        """Copy what is shared; an error is raised by :meth:`copied`, since the ranks must learn of it together."""
        try:
            while self._pending:  # drops its hold on each tensor as soon as it is copied
                source, target = self._pending.popleft()
                source.copy_to(target)
        except Exception as error:
            self._error = error
        finally:
            self._pending.clear()

    def copied(self) -> RankPart:
        """Return the copy.

        Raises:
            Exception: what :meth:`copy` ran into.
        """
        if self._error is not None:
            raise self._error
        assert not self._pending
        return self._part


def as_of_now(values: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function that returns the present values of a tensor, 1-d, whatever the program writes to it later.

    They are shared with a CPU tensor, as :class:`Snapshot` does. Of other tensors they are a copy on the CPU.
    """
    present = values().contiguous().view(-1)
    shared = _shared(present) if present.is_cpu else None
    return partial(_same, present.to("cpu", copy=True) if shared is None else shared)


def _shared(values: Tensor) -> Tensor | None:
    """Return a tensor that keeps the present values of a CPU tensor; None if its memory cannot be shared."""
    try:
        return torch._lazy_clone(values)
    except RuntimeError:
        return None


def _same(values: Tensor) -> Tensor:
    return values


def _targets(part: RankPart, memory: HostMemory) -> dict[str, Tensor]:
    """The memory of each tensor's copy."""
    rest, targets = memory.take(part.num_bytes), {}
    for key in part.in_order():
        source = part.sources[key]
        size = numel(source.share) * source.dtype.itemsize
        targets[key], rest = rest[:size].view(source.dtype), rest[size:]
    return targets


def _copied(source: Source, target: Tensor) -> Source:
    return Source(dtype=source.dtype, values=partial(_same, target), held=source.share, share=source.share)
