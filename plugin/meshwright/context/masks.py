"""The mask of one forward pass: a function of places in the sequence, of which blocks are made when needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.sequence_parts import Run

BLOCK = 1024  # queries whose mask is materialised at a time


@dataclass(kw_only=True)
class ContextMask:
    """Which token attends to which, over the whole sequence.

    transformers makes it from its own mask functions, so windows, packed documents and chunks are as on one device.

    Args:
        function: a function of the indices of row, head, query and key; True where the query attends to the key.
        padding: which tokens are not padding, ``[B, S]``; None if all are not.
        rows: the number of rows B.
        length: the length of the sequence S.
        window: the number of tokens to which a query attends at most, if the mask limits it.
        is_plain: whether the mask is that of causal attention, within ``window`` if that is given, and nothing else.
        averages_blind: whether a query that attends to no key gets the average of all values, as an added mask makes
            it; otherwise it gets zeros.
        is_vectorized: whether ``function`` takes tensors that broadcast; otherwise it takes one place at a time.
        device: the device on which blocks are made.
    """

    function: Callable[..., Any]
    padding: Tensor | None
    rows: int
    length: int
    window: int | None
    is_plain: bool
    averages_blind: bool
    is_vectorized: bool
    device: torch.device
    _visible: dict[Run, tuple[int, int]] = field(default_factory=dict)
    _blind: dict[Run, Tensor] = field(default_factory=dict)

    @property
    def is_causal_alone(self) -> bool:
        """Whether the mask is that of causal attention without a window."""
        return self.is_plain and (self.window is None or self.length <= self.window)

    def visible(self, queries: Run) -> tuple[int, int]:
        """Return the smallest range of keys that holds all keys that the queries' attention depends on; never empty.

        For a mask that depends on values, such as packed documents, the host waits for the device, once for each block
        of queries in a forward pass.
        """
        if queries not in self._visible:
            self._visible[queries] = self._analytic(queries) if self.is_plain else self._measured(queries)
        return self._visible[queries]

    def _analytic(self, queries: Run) -> tuple[int, int]:
        low = 0 if self.window is None else max(0, min(queries.start, self.length - 1) - self.window + 1)
        return low, max(low + 1, min(queries.stop, self.length))

    def _measured(self, queries: Run) -> tuple[int, int]:
        seen = self.block(queries, Run(0, self.length))
        blind = ~seen.any(-1)
        if self.averages_blind and bool(blind.any()):
            self._blind[queries] = blind
            return 0, self.length
        places = seen.flatten(0, 2).any(0).nonzero()
        return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 1)

    def blind(self, queries: Run) -> Tensor | None:
        """Return which of the queries get the average of all values, ``[B or 1, 1, queries]``; None if none does."""
        self.visible(queries)
        return self._blind.get(queries)

    def block(self, queries: Run, keys: Run) -> Tensor:
        """Return the mask of a block, bool ``[B or 1, 1, queries, keys]``.

        Queries beyond the end of the sequence act as the last one.
        """
        last = self.length - 1
        q = torch.arange(queries.start, queries.stop, device=self.device).clamp(max=last)
        k = torch.arange(keys.start, keys.stop, device=self.device)
        row, head = torch.arange(self.rows, device=self.device), torch.zeros(1, dtype=torch.int64, device=self.device)
        inside = k.clamp(max=last)
        function = self.function
        if self.is_vectorized:
            found = function(row[:, None, None, None], head[None, :, None, None], q[:, None], inside)
        else:
            for place in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
                function = torch.vmap(function, in_dims=place)
            found = function(row, head, q, inside)
        found = found.reshape(-1, 1, *found.shape[-2:]) if found.ndim > 2 else found[None, None]
        if self.padding is not None:
            found = found & self.padding[:, inside][:, None, None]
        result: Tensor = found if keys.stop <= self.length else found & (k < self.length)
        return result


def query_blocks(runs: tuple[Run, ...]) -> list[tuple[slice, Run]]:
    """Return the blocks of a rank's queries: where each lies among its own tokens, and in the sequence."""
    blocks, offset = [], 0
    for run in runs:
        for start in range(0, run.size, BLOCK):
            size = min(BLOCK, run.size - start)
            blocks.append((slice(offset + start, offset + start + size), Run(run.start + start, size)))
        offset += run.size
    return blocks
