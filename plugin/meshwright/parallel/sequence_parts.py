"""The part of a sequence that each rank of cp holds: two chunks, one from each end, so that causal work is even.

A sequence is padded to ``2 cp`` chunks of equal length. Rank r holds chunk r and chunk ``2 cp - 1 - r`` ("zigzag"). A
late token attends to more tokens than an early one, and each such pair of chunks has the same work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.parallel.collectives import Axis, all_gather


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a sequence.

    Args:
        start: the place of the first token in the sequence.
        size: the number of tokens. The last ones may lie in the padding.
    """

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class SequenceParts:
    """How the ranks of cp share a sequence.

    Args:
        axis: this rank's place on cp.

    Example:
        >>> SequenceParts(Axis("cp", size=2, rank=0)).runs(8)
        (Run(start=0, size=2), Run(start=6, size=2))
    """

    axis: Axis

    def chunk(self, length: int) -> int:
        """Return the number of tokens in a chunk of a sequence of ``length`` tokens."""
        return -(-length // (2 * self.axis.size))

    def runs(self, length: int, first: int | None = None, ranks: int = 1) -> tuple[Run, Run]:
        """Return the tokens that this rank holds, or those of ``ranks`` ranks beginning with ``first``."""
        first = self.axis.rank if first is None else first
        size = self.chunk(length)
        low, high = first * size, (2 * self.axis.size - first - ranks) * size
        return Run(low, ranks * size), Run(high, ranks * size)

    def take(self, x: Tensor, dim: int, fill: float = 0) -> Tensor:
        """Return this rank's tokens of a tensor that has all tokens along ``dim``; padding has the value ``fill``."""
        length = x.shape[dim]
        pieces = []
        for run in self.runs(length):
            stop = min(run.stop, length)
            piece = x.narrow(dim, min(run.start, length), max(stop - run.start, 0))
            if (missing := run.size - piece.shape[dim]) > 0:
                after = x.ndim - 1 - dim % x.ndim
                piece = F.pad(piece, (0, 0) * after + (0, missing), value=fill)
            pieces.append(piece)
        return torch.cat(pieces, dim)

    def join(self, x: Tensor, dim: int, length: int, *, is_taken_again: bool = False) -> Tensor:
        """Return all tokens in order, without padding, from each rank's tokens; every rank of cp must make the call.

        The result is the same on all ranks of cp, and so is a loss that a program computes from it. Backward passes
        ``cp`` times this rank's part of the gradient on, since gradients of parameters are averaged over cp.

        Args:
            x: this rank's tokens.
            dim: the dim of the tokens.
            length: the number of tokens of the sequence.
            is_taken_again: whether each rank uses its own tokens of the result only, so that its gradient is that of
                these tokens.
        """
        result: Tensor = _Join.apply(x, self, dim, length, 1 if is_taken_again else self.axis.size)
        return result

    def ordered(self, parts: Tensor, dim: int) -> Tensor:
        """Return all tokens in order, with padding, from the stacked parts ``[cp, ...]`` of the ranks.

        Args:
            parts: the parts, in the order of the ranks.
            dim: the dim of a part that holds its tokens.
        """
        low, high = zip(*(part.chunk(2, dim) for part in parts.unbind()), strict=True)
        return torch.cat([*low, *reversed(high)], dim)

    def parted(self, x: Tensor, dim: int) -> Tensor:
        """Return the stacked parts ``[cp, ...]`` of all ranks: the inverse of :meth:`ordered`."""
        chunks = x.chunk(2 * self.axis.size, dim)
        size = self.axis.size
        return torch.stack([torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim) for rank in range(size)])


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: SequenceParts, dim: int, length: int, factor: int) -> Tensor:
        ctx.parts, ctx.dim, ctx.factor = parts, dim, factor
        gathered = all_gather(x[None], parts.axis)
        return parts.ordered(gathered, dim).narrow(dim, 0, length).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.parts.take(grad, ctx.dim) * ctx.factor, None, None, None, None
