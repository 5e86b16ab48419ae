"""Records operations on tensors without memory, so that each tensor can be computed later, without the others.

A tensor is identified by its window on a storage, so views are not recorded. The generator's state before each
operation that draws random numbers is kept. Any storage can therefore be replayed alone, in any order, and is bitwise
equal to the result of running all operations in order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

# Operators that overwrite their first argument. Replay skips earlier operations whose result is overwritten.
_OVERWRITING = frozenset(
    f"aten::{name}_"
    for name in ("bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal", "normal", "random")
) | {"aten::uniform_", "aten::zero_"}


@dataclass(frozen=True)
class RecordedWindow:
    """A strided view of one recorded storage; sizes, strides and offset in elements."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The number of bytes from the first element to the last."""
        if 0 in self.size:
            return 0
        return (1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))) * self.dtype.itemsize

    def alone(self) -> RecordedWindow:
        """Return the same window with offset 0, for a storage that holds only this window."""
        return dataclasses.replace(self, offset=0)

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Draw:
    """The saved generator state that an operation starts from; replaces the generator in the recorded arguments."""

    state: int


@dataclass(frozen=True)
class RecordedOperation:
    """One recorded call.

    Args:
        function: the operator.
        arguments: the call's args and kwargs, with windows for recorded tensors and copies of all other tensors.
        written: the windows that the call changes in place.
        created: the windows of the call's new tensors, in order of return.
        draw: the generator state that the call starts from, if it draws random numbers.
    """

    function: OpOverload
    arguments: tuple[tuple[object, ...], dict[str, object]]
    written: tuple[RecordedWindow, ...]
    created: tuple[RecordedWindow, ...] = ()
    draw: Draw | None = None

    def __str__(self) -> str:
        shown = tree_map_only(Tensor, lambda x: (tuple(x.shape), x.dtype, x.stride()), self.arguments)
        return f"{self.function} {shown} {self.written} {self.created} {self.draw}"

    @property
    def hidden(self) -> RecordedWindow | None:
        """The window that this operation overwrites without reading it, if any."""
        first = self.arguments[0][0] if self.arguments[0] else None
        return first if self.function._schema.name in _OVERWRITING and isinstance(first, RecordedWindow) else None

    def read(self) -> Iterator[RecordedWindow]:
        skipped = self.hidden
        for leaf in tree_iter(self.arguments):
            if isinstance(leaf, RecordedWindow) and leaf is not skipped:
                yield leaf


@dataclass(eq=False)
class Tape:
    """The operations of one recording, and the storages that they use.

    Args:
        draws: whether recording advances the generators as the operations themselves would have.
    """

    draws: bool = True
    sizes: list[int] = field(default_factory=list)  # bytes of each storage
    operations: list[RecordedOperation] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # generator states

    def add_storage(self, num_bytes: int) -> int:
        self.sizes.append(num_bytes)
        return len(self.sizes) - 1

    def is_written(self, window: RecordedWindow) -> bool:
        """Return whether any recorded operation writes to the window's storage."""
        return any(window.storage == w.storage for op in self.operations for w in (*op.written, *op.created))

    def record(
        self,
        function: OpOverload,
        arguments: object,
        written: Sequence[RecordedWindow],
        created: Sequence[RecordedWindow] = (),
    ) -> None:
        """Record an operation; if it draws random numbers and ``draws`` is set, advance the generator accordingly."""
        draw = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            given = [leaf for leaf in tree_iter(arguments) if isinstance(leaf, Generator)]
            draw = Draw(len(self.states))
            self.states.append((given[0] if given else torch.default_generator).get_state())
        recorded = tree_map_only(Generator, lambda _: draw, tree_map_only(Tensor, _copy, arguments))
        operation = RecordedOperation(function, recorded, tuple(written), tuple(created), draw)
        if draw is not None and self.draws:
            # The operation runs on real values, since the values may decide how many numbers it draws.
            args, kwargs = tree_map_only(RecordedWindow, lambda w: self._scratch(w, operation), arguments)
            function(*args, **kwargs)
        self.operations.append(operation)

    def _scratch(self, window: RecordedWindow, operation: RecordedOperation) -> Tensor:
        return window.alone().on(reserve(window.num_bytes)) if window is operation.hidden else self.replay(window)

    @torch.no_grad()
    def replay(self, window: RecordedWindow) -> Tensor:
        """Compute the values that the recorded operations leave in a window, in new memory."""
        storages: dict[int, torch.UntypedStorage] = {}

        def tensor(leaf: object) -> Any:
            if isinstance(leaf, Draw):
                return Generator().set_state(self.states[leaf.state])
            if not isinstance(leaf, RecordedWindow):
                return leaf
            if leaf.storage not in storages:
                storages[leaf.storage] = reserve(self.sizes[leaf.storage])
            return leaf.on(storages[leaf.storage])

        with torch.random.fork_rng(devices=[]):
            for operation in self._needed(window):
                if operation.draw is not None:
                    torch.default_generator.set_state(self.states[operation.draw.state])
                args, kwargs = tree_map(tensor, operation.arguments)
                result = operation.function(*args, **kwargs)
                if operation.created:
                    fresh = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
                    for target, value in zip(operation.created, fresh, strict=True):
                        # Copied, since a real operator may return other strides than the recorded ones.
                        tensor(target).copy_(value)
        wanted: Tensor = tensor(window)
        return wanted

    def _needed(self, window: RecordedWindow) -> list[RecordedOperation]:
        """Return the operations that a window's values depend on, in order."""
        storages, needed = {window.storage}, []
        for operation in reversed(self.operations):
            if storages.isdisjoint(w.storage for w in (*operation.written, *operation.created)):
                continue
            needed.append(operation)
            hidden = operation.hidden
            if hidden is not None and self._is_whole(hidden):
                storages.discard(hidden.storage)
            storages.difference_update(w.storage for w in operation.created)
            storages.update(w.storage for w in operation.read())
        return needed[::-1]

    def _is_whole(self, window: RecordedWindow) -> bool:
        own = torch.Size(window.size).numel() * window.dtype.itemsize
        return own == window.num_bytes == self.sizes[window.storage]

    def constants(self) -> list[Tensor]:
        """Return the tensors that the operations read but did not compute."""
        return [leaf for op in self.operations for leaf in tree_iter(op.arguments) if isinstance(leaf, Tensor)]

    def form(self) -> str:
        """Return a digest of the recording without the values of generator states and constants."""
        text = "\n".join([str(self.sizes), *map(str, self.operations)])
        return hashlib.sha256(text.encode()).hexdigest()


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


_MAPPED_BYTES = 2**16  # smaller blocks are not mapped, since a process has only a few thousand mappings


def reserve(num_bytes: int) -> torch.UntypedStorage:
    """Return a storage whose pages become resident when written, and are released when the storage is freed.

    The memory is mapped, since an allocator would return resident pages and keep them after they are freed.
    """
    if num_bytes < _MAPPED_BYTES:
        return torch.UntypedStorage(num_bytes)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8).untyped_storage()
