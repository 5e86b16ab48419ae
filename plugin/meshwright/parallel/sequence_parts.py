"""The part of a sequence that each rank of cp holds: chunks of equal length, chosen so that attention's work is even.

A sequence is padded to ``2 cp`` chunks. Rank r holds chunk r and chunk ``2 cp - 1 - r`` ("zigzag"). A late token
attends to more tokens than an early one, and each such pair of chunks has the same work. A row of packed documents has
its work elsewhere, so it is cut into more chunks, which are dealt by their work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.autograd import Node, TensorFunction
from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import all_gather, reduce_scatter

_CHUNKS = 8, 16  # chunks per rank of a row of documents: the first number, or the second if the first leaves it uneven
_SMALLEST = 64  # tokens of a chunk of such a row; smaller ones cost more calls of attention than the balance saves
_EVEN = 1.05  # largest ratio of a rank's work to the mean that counts as even


@dataclass(frozen=True)
class TokenRun:
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
        dealt: the numbers of the chunks that each rank holds, in rising order; None for zigzag.

    Example:
        >>> SequenceParts(Axis("cp", size=2, rank=0)).runs(8)
        (TokenRun(start=0, size=2), TokenRun(start=6, size=2))
    """

    axis: Axis
    dealt: tuple[tuple[int, ...], ...] | None = None

    def balanced(self, work: Tensor) -> SequenceParts:
        """Return parts of nearly the same work; these parts if they are even enough.

        Args:
            work: the number of keys that each token attends to, ``[S]``, the same on all ranks.
        """
        ranks = self.axis.size
        most = len(work) // (ranks * _SMALLEST)
        parts = self
        if ranks > 1 and most > 2:
            for each in (min(chunks, most) for chunks in _CHUNKS):
                if _unevenness(parts, work) > _EVEN:
                    parts = replace(self, dealt=_dealt(_work_of_chunks(work, each * ranks), ranks))
        return parts

    @property
    def chunks_of(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the chunks that each rank holds."""
        last = 2 * self.axis.size - 1
        return self.dealt or tuple((rank, last - rank) for rank in range(self.axis.size))

    def chunk(self, length: int) -> int:
        """Return the number of tokens in a chunk of a sequence of ``length`` tokens."""
        return -(-length // (len(self.chunks_of[0]) * self.axis.size))

    def runs(self, length: int, first: int | None = None, ranks: int = 1) -> tuple[TokenRun, ...]:
        """Return the tokens that this rank holds, or those of ``ranks`` ranks beginning with ``first``.

        A run has at most half of the tokens, so that a block of attention has no more keys than the planner expects.
        """
        size, held = self.chunk(length), self._held(self.axis.rank if first is None else first, ranks)
        runs: list[TokenRun] = []
        for start in (number * size for number in sorted(sum(held, ()))):
            if runs and runs[-1].stop == start and 2 * runs[-1].size < len(held) * len(held[0]) * size:
                runs[-1] = TokenRun(runs[-1].start, runs[-1].size + size)
            else:
                runs.append(TokenRun(start, size))
        return tuple(runs)

    def _held(self, first: int, ranks: int) -> tuple[tuple[int, ...], ...]:
        return self.chunks_of[first : first + ranks]

    def take(self, x: Tensor, dim: int, fill: float = 0) -> Tensor:
        """Return this rank's tokens of a tensor that has all tokens along ``dim``; padding has the value ``fill``."""
        taken: Tensor = _Take.apply(x, self.runs(x.shape[dim]), dim % x.ndim, fill)
        return taken

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
        return _Join.apply(x, self, dim, length, 1 if is_taken_again else self.axis.size)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return all tokens in order, with padding, from each rank's tokens; every rank of cp must make the call.

        Each rank may use all tokens of the result, so backward sums the gradients of the ranks.
        """
        return _Gather.apply(x, self, dim)

    def ordered(self, parts: Tensor, dim: int, first: int = 0) -> Tensor:
        """Return the tokens of some ranks in order, with padding, from their stacked parts ``[ranks, ...]``.

        Args:
            parts: the parts, in the order of the ranks.
            dim: the dim of a part that holds its tokens.
            first: the first of the ranks.
        """
        held = self._held(first, len(parts))
        chunks: dict[int, Tensor] = {}
        for numbers, part in zip(held, parts.unbind(), strict=True):
            chunks |= zip(numbers, part.chunk(len(numbers), dim), strict=True)
        return torch.cat([chunks[number] for number in sorted(chunks)], dim)

    def parted(self, x: Tensor, dim: int, first: int = 0, ranks: int | None = None) -> Tensor:
        """Return the stacked parts ``[ranks, ...]`` of some ranks, all by default: the inverse of :meth:`ordered`."""
        held = self._held(first, self.axis.size if ranks is None else ranks)
        numbers = sorted(sum(held, ()))
        chunks = dict(zip(numbers, x.chunk(len(numbers), dim), strict=True))
        return torch.stack([torch.cat([chunks[number] for number in own], dim) for own in held])


class Parted(Protocol):
    """An object that knows how the ranks share the current sequence."""

    parts: SequenceParts


def _work_of_chunks(work: Tensor, chunks: int) -> list[int]:
    size = -(-len(work) // chunks)
    found: list[int] = F.pad(work, (0, chunks * size - len(work))).view(chunks, size).sum(1).tolist()
    return found


def _unevenness(parts: SequenceParts, work: Tensor) -> float:
    """Return the work of the rank that has most, over the mean."""
    held = parts.chunks_of
    of_chunk = _work_of_chunks(work, len(held) * len(held[0]))
    return max(sum(of_chunk[number] for number in own) for own in held) * len(held) / max(1, sum(of_chunk))


def _dealt(work: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Deal chunks to ranks, equally many to each: the chunk with most work first, to the rank that has least."""
    held: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for number in sorted(range(len(work)), key=lambda n: -work[n]):
        rank = min((r for r in range(ranks) if len(held[r]) < len(work) // ranks), key=lambda r: load[r])
        held[rank].append(number)
        load[rank] += work[number]
    return tuple(tuple(sorted(own)) for own in held)


class _Join(TensorFunction):
    is_linear = True

    @staticmethod
    def forward(ctx: Node, x: Tensor, parts: SequenceParts, dim: int, length: int, factor: int) -> Tensor:
        ctx.parts, ctx.dim, ctx.factor = parts, dim, factor
        gathered = all_gather(x[None], parts.axis)
        return parts.ordered(gathered, dim).narrow(dim, 0, length).contiguous()

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.parts.take(grad, ctx.dim) * ctx.factor, None, None, None, None


class _Gather(TensorFunction):
    is_linear = True

    @staticmethod
    def forward(ctx: Node, x: Tensor, parts: SequenceParts, dim: int) -> Tensor:
        ctx.parts, ctx.dim = parts, dim
        return parts.ordered(all_gather(x[None], parts.axis), dim)

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(ctx.parts.parted(grad, ctx.dim), ctx.parts.axis)[0], None, None


class _Take(TensorFunction):
    """Joins runs of the tokens of a tensor; see :meth:`SequenceParts.take`.

    Backward makes one tensor of all tokens. With autograd's own operations it would make one for each run.
    """

    is_linear = True

    @staticmethod
    def forward(ctx: Node, x: Tensor, runs: tuple[TokenRun, ...], dim: int, fill: float) -> Tensor:
        ctx.shape, ctx.dim, ctx.runs = x.shape, dim, runs
        return tokens_of(x, runs, dim, fill)

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> tuple[Tensor, None, None, None]:
        whole = grad.new_zeros(ctx.shape)
        for run, piece in zip(ctx.runs, grad.split([run.size for run in ctx.runs], ctx.dim), strict=True):
            target = _within(whole, ctx.dim, run)
            target.copy_(piece.narrow(ctx.dim, 0, target.shape[ctx.dim]))
        return whole, None, None, None


def tokens_of(x: Tensor, runs: tuple[TokenRun, ...], dim: int, fill: float = 0) -> Tensor:
    """Return the tokens of some runs along ``dim``, one after the other; padding has the value ``fill``."""
    pieces = []
    for run in runs:
        piece = _within(x, dim, run)
        if (missing := run.size - piece.shape[dim]) > 0:
            after = x.ndim - 1 - dim
            piece = F.pad(piece, (0, 0) * after + (0, missing), value=fill)
        pieces.append(piece)
    return torch.cat(pieces, dim)


def _within(x: Tensor, dim: int, run: TokenRun) -> Tensor:
    """Return a view of the tokens of a run, without those that lie in the padding."""
    length = x.shape[dim]
    start = min(run.start, length)
    return x.narrow(dim, start, max(min(run.stop, length) - start, 0))
