"""Record operations on tensors whose memory does not exist yet, so that any one of them can be computed later.

A tensor is identified by its window on a storage, so views need no record. An operation that draws random
numbers keeps the generator's state from before it. So any storage can be replayed alone, in any order, and is
bitwise equal to the result of running everything in order.
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
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

# These overwrite their first argument. Replay skips earlier operations whose result is overwritten.
_OVERWRITING = frozenset(
    f"aten::{name}_"
    for name in ("bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal", "normal", "random")
) | {"aten::uniform_", "aten::zero_"}


@dataclass(frozen=True)
class Window:
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

    def alone(self) -> Window:
        """The same window at the start of a storage of its own."""
        return dataclasses.replace(self, offset=0)

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Draw:
    """The saved generator state that an operation starts from; stands for the generator in its arguments."""

    state: int


@dataclass(frozen=True)
class Operation:
    """One recorded call.

    Args:
        function: the operator.
        arguments: its args and kwargs, with windows for recorded tensors and copies of all others.
        written: the windows that it changes in place.
        created: the windows of its new tensors, in order of return.
        draw: the generator state from which it draws random numbers, if it does.
    """

    function: Any
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    written: tuple[Window, ...]
    created: tuple[Window, ...] = ()
    draw: Draw | None = None

    def __str__(self) -> str:
        shown = tree_map_only(Tensor, lambda x: (tuple(x.shape), x.dtype, x.stride()), self.arguments)
        return f"{self.function} {shown} {self.written} {self.created} {self.draw}"

    @property
    def hidden(self) -> Window | None:
        """The window that this operation overwrites without reading it, if any."""
        first = self.arguments[0][0] if self.arguments[0] else None
        return first if self.function._schema.name in _OVERWRITING and isinstance(first, Window) else None

    def read(self) -> Iterator[Window]:
        skipped = self.hidden
        for leaf in tree_iter(self.arguments):
            if isinstance(leaf, Window) and leaf is not skipped:
                yield leaf


@dataclass(eq=False)
class Tape:
    """The operations of one recording, and the storages they work on.

    Args:
        draws: whether recording advances the generators as the operations themselves would have.
    """

    draws: bool = True
    sizes: list[int] = field(default_factory=list)  # bytes of each storage
    operations: list[Operation] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # generator states

    def add_storage(self, num_bytes: int) -> int:
        self.sizes.append(num_bytes)
        return len(self.sizes) - 1

    def is_written(self, window: Window) -> bool:
        """Whether any recorded operation writes to the window's storage."""
        return any(window.storage == w.storage for op in self.operations for w in (*op.written, *op.created))

    def record(self, function: Any, arguments: Any, written: Sequence[Window], created: Sequence[Window] = ()) -> None:
        """Add an operation; if it draws random numbers, advance the generator as it would."""
        draw = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            given = [leaf for leaf in tree_iter(arguments) if isinstance(leaf, Generator)]
            draw = Draw(len(self.states))
            self.states.append((given[0] if given else torch.default_generator).get_state())
        recorded = tree_map_only(Generator, lambda _: draw, tree_map_only(Tensor, _copy, arguments))
        operation = Operation(function, recorded, tuple(written), tuple(created), draw)
        if draw is not None and self.draws:
            # The operation runs on the values that it reads, since they may decide how many numbers are drawn.
            args, kwargs = tree_map_only(Window, lambda w: self._scratch(w, operation), arguments)
            function(*args, **kwargs)
        self.operations.append(operation)

    def _scratch(self, window: Window, operation: Operation) -> Tensor:
        return window.alone().on(reserve(window.num_bytes)) if window is operation.hidden else self.replay(window)

    @torch.no_grad()
    def replay(self, window: Window) -> Tensor:
        """Compute the values that the recorded operations leave in a window, in new memory."""
        storages: dict[int, torch.UntypedStorage] = {}

        def tensor(leaf: Any) -> Any:
            if isinstance(leaf, Draw):
                return Generator().set_state(self.states[leaf.state])
            if not isinstance(leaf, Window):
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

    def _needed(self, window: Window) -> list[Operation]:
        """The operations that a window's values depend on, in order."""
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

    def _is_whole(self, window: Window) -> bool:
        span = 1 + sum((n - 1) * s for n, s in zip(window.size, window.stride, strict=True))
        num_elements = torch.Size(window.size).numel()
        return span == num_elements and num_elements * window.dtype.itemsize == self.sizes[window.storage]

    def constants(self) -> list[Tensor]:
        """The tensors that the operations read but did not compute."""
        return [leaf for op in self.operations for leaf in tree_iter(op.arguments) if isinstance(leaf, Tensor)]

    def form(self) -> str:
        """A digest of everything but the values of generator states and constants."""
        text = "\n".join([str(self.sizes), *map(str, self.operations)])
        return hashlib.sha256(text.encode()).hexdigest()


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


_MAPPED_BYTES = 2**16  # less memory is not worth one of a process's few thousand mappings


def reserve(num_bytes: int) -> torch.UntypedStorage:
    """Memory whose pages become resident when they are written, and are returned when it is freed.

    It is mapped, since an allocator would hand out resident pages and keep them when they are freed.
    """
    if num_bytes < _MAPPED_BYTES:
        return torch.UntypedStorage(num_bytes)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8).untyped_storage()
