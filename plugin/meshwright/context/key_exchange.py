"""Brings the keys of the other ranks to a rank's queries, and the gradients of the keys back.

``round`` yields keys and values in turn, each with the places of its tokens in the sequence, this rank's own first. In
backward they go round again, and ``gradients`` adds up what each rank has found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.faults.interpose import own_collectives
from meshwright.mesh.axes import Axis
from meshwright.mesh.process_group import wait_for_message
from meshwright.parallel.collectives import all_gather, reduce_scatter
from meshwright.parallel.sequence_parts import SequenceParts, TokenRun

Keys = tuple[tuple[TokenRun, ...], Tensor, Tensor]  # places of tokens in the sequence, the tokens' keys and values


class KeyGradients(Protocol):
    """Adds up the gradients of keys and values, in the order in which ``round`` yields them."""

    def of_block(self) -> tuple[Tensor, Tensor]:
        """Return zeros, to which the gradients of the current keys and values are added."""

    def pass_on(self) -> None:
        """Hand on what was added, since the current keys are done."""

    def own(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values, summed over all ranks."""


class KeyExchange(Protocol):
    """Brings keys to queries, and gradients back."""

    def round(self, k: Tensor, v: Tensor) -> Iterator[Keys]:
        """Yield all keys and values that this rank's queries may attend to."""

    def gradients(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> KeyGradients:
        """Return an object that adds up gradients in ``dtype``."""


@dataclass(frozen=True)
class WholeKeys:
    """The keys and values of the whole sequence at once.

    Args:
        parts: how the ranks share the sequence, whose keys are gathered in forward and again in backward; None if the
            given keys are those of the whole sequence.
    """

    parts: SequenceParts | None

    def gathered(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the whole sequence, padding included, in order: one all-gather."""
        if self.parts is None:
            return k, v
        both = self.parts.ordered(all_gather(torch.cat([k, v], -1)[None], self.parts.axis), 2)
        return _apart(both, k.shape[-1])

    def round(self, k: Tensor, v: Tensor) -> Iterator[Keys]:
        k, v = self.gathered(k, v)
        yield (TokenRun(0, k.shape[2]),), k, v

    def gradients(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> KeyGradients:
        return _WholeKeyGradients(self.parts, k, v, dtype)


class _WholeKeyGradients:
    """The gradients of all keys and values, which one reduce-scatter brings to the ranks that hold them."""

    def __init__(self, parts: SequenceParts | None, k: Tensor, v: Tensor, dtype: torch.dtype):
        self.parts, self.size = parts, k.shape[-1]
        length = k.shape[2] * (1 if parts is None else parts.axis.size)
        self._both = torch.zeros(*k.shape[:2], length, self.size + v.shape[-1], dtype=dtype, device=k.device)

    def of_block(self) -> tuple[Tensor, Tensor]:
        return _apart(self._both, self.size)

    def pass_on(self) -> None:
        pass

    def own(self) -> tuple[Tensor, Tensor]:
        both = self._both
        if self.parts is not None:
            both = reduce_scatter(self.parts.parted(both, 2), self.parts.axis)[0]
        return _apart(both, self.size)


@dataclass(frozen=True)
class RingKeys:
    """The keys and values of one rank of a ring after the other; the next ones travel while a block is used.

    Args:
        axis: the ranks of the ring.
        runs_of: where the tokens of each rank of the ring lie in the sequence.
    """

    axis: Axis
    runs_of: tuple[tuple[TokenRun, ...], ...]

    def round(self, k: Tensor, v: Tensor) -> Iterator[Keys]:
        axis, both = self.axis, torch.cat([k, v], -1).contiguous()
        for hop in range(axis.size):
            arrive = _start_shift(both, axis) if hop < axis.size - 1 else None
            runs = self.runs_of[(axis.rank - hop) % axis.size]
            yield (runs, *_apart(both, k.shape[-1]))
            if arrive is not None:
                both = arrive()

    def gradients(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> KeyGradients:
        return _RingGradients(self.axis, k, v, dtype)


class _RingGradients:
    """The gradients of the keys and values that go round, which every rank adds to and passes on with its block."""

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, dtype: torch.dtype):
        self.axis, self.size = axis, k.shape[-1]
        self._like = (*k.shape[:3], k.shape[3] + v.shape[3]), dtype, k.device
        self._arrive: Callable[[], Tensor] | None = None

    def of_block(self) -> tuple[Tensor, Tensor]:
        shape, dtype, device = self._like
        self._both = torch.zeros(shape, dtype=dtype, device=device)
        return _apart(self._both, self.size)

    def pass_on(self) -> None:
        """Add what the ranks before have found for the block, and send the sum to the next rank."""
        if self._arrive is not None:
            self._both += self._arrive()
        self._arrive = _start_shift(self._both, self.axis)

    def own(self) -> tuple[Tensor, Tensor]:
        assert self._arrive is not None
        both = self._arrive()
        return _apart(both, self.size)


def _apart(both: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of a tensor that holds both, given the number of channels of a key."""
    return both[..., :size], both[..., size:]


@own_collectives()
def _start_shift(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Start to send ``x`` to the next rank of a ring; the returned function waits for that of the rank before."""
    if axis.size == 1:
        return lambda: x
    assert axis.group is not None
    out = torch.empty_like(x)
    ranks = dist.get_process_group_ranks(axis.group)
    following, previous = ranks[(axis.rank + 1) % axis.size], ranks[axis.rank - 1]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, following, group=axis.group),
            dist.P2POp(dist.irecv, out, previous, group=axis.group),
        ]
    )

    sent = x  # must stay alive until it has been sent

    def wait() -> Tensor:
        for work in works:
            wait_for_message(work, axis.group, out.device)
        assert sent.shape == out.shape
        return out

    return wait
