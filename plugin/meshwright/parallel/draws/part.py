"""The part of a draw that a rank keeps: the rows, the heads or channels, and the tokens that it computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import PlanError
from meshwright.mesh.axes import Axis
from meshwright.parallel.draws.kernels import Call, advance, generator_of
from meshwright.parallel.draws.score_blocks import ScoreBlock, running_blocks
from meshwright.parallel.draws.sites import Dim, Form
from meshwright.parallel.sequence_parts import SequenceParts, TokenRun, tokens_of


@dataclass(frozen=True)
class DrawnPart:
    """A part of a tensor that one device would draw.

    Args:
        shape: the shape of the whole tensor.
        entries: for each dim, the numbers of its rows and of the entries of each row; without the rows, of 1 row.
        rows: the dim with the rows and the first and the number of those that are kept; None if all are.
        channels: the dim of which some entries of each row are kept, the first and the number of them; None for all.
        runs: the dims of tokens of which this rank of cp keeps some of each row, with the places of these.
        tokens: the dim of the rows, that of the tokens, which may be the same, and how many tokens of a row each rank
            has, if the ranks of tp share the tokens of all rows, one row after the other, or those of their rank of cp;
            None if each has all.
        tp: this rank of tp, and the number of them.
    """

    shape: tuple[int, ...]
    entries: tuple[tuple[int, int], ...]
    rows: tuple[int, int, int] | None = None
    channels: tuple[int, int, int] | None = None
    runs: tuple[tuple[int, tuple[TokenRun, ...]], ...] = ()
    tokens: tuple[int, int, int] | None = None
    tp: tuple[int, int] = (0, 1)

    @property
    def is_whole(self) -> bool:
        return self.rows is self.channels is self.tokens is None and not self.runs

    def of(self, whole: Tensor, fill: int = 0) -> Tensor:
        """Return this part of a whole tensor, of the shape that the rank draws; padding has the value ``fill``."""
        split = whole.reshape([size for pair in self.entries for size in pair])  # dims 2 i and 2 i + 1
        if self.rows is not None:
            split = split.narrow(2 * self.rows[0], *self.rows[1:])
        if self.channels is not None:
            split = split.narrow(2 * self.channels[0] + 1, *self.channels[1:])
        for dim, runs in self.runs:
            split = tokens_of(split, runs, 2 * dim + 1, fill)
        sizes = [split.shape[i] * split.shape[i + 1] for i in range(0, split.ndim, 2)]
        if self.tokens is None:
            return split.reshape(sizes)
        of_rows, dim, local = self.tokens
        rank, ranks = self.tp
        rows, length = split.shape[2 * of_rows], split.shape[2 * dim + 1]
        flat = split.flatten(2 * of_rows, 2 * dim + 1).movedim(2 * of_rows, 0)
        padding = rows * (ranks * local - length)
        flat = F.pad(flat, (*(0, 0) * (flat.ndim - 1), 0, padding), value=fill)
        flat = flat.narrow(0, rank * rows * local, rows * local)
        sizes[dim] = local if of_rows < dim else rows * local
        return flat.movedim(0, 2 * of_rows).reshape(sizes)


def part_of(
    form: Form,
    own: Sequence[int],
    *,
    rows: range,
    total: int,
    lengths: Mapping[str, int],
    tp: Axis,
    parts: SequenceParts,
    block: ScoreBlock | None,
    shares_tokens: bool,
) -> DrawnPart | None:
    """Return the part of a draw that a rank keeps; None if its shape does not show it.

    Args:
        form: how the shape on one device follows from the batch.
        own: the shape of what the rank draws.
        rows: the rows of the global batch that run now.
        total: the number of rows of the global batch.
        lengths: the numbers of tokens of the inputs.
        tp: the axis whose ranks have parts of heads, channels or tokens.
        parts: how the ranks of cp share a sequence.
        block: which of attention's scores are drawn; None for anything else.
        shares_tokens: whether the ranks of tp may have parts of the tokens.
    """
    entries: list[tuple[int, int]] = []
    of_rows = of_channels = of_tokens = None
    of_runs: list[tuple[int, tuple[TokenRun, ...]]] = []
    places = None if block is None else iter((block.queries, block.keys))
    share, shares = (0, 1) if block is None else block.heads
    share, shares = tp.rank * shares + share, tp.size * shares
    for dim, size in enumerate(own):
        known, count = form[dim], form[dim].entries(lengths)
        entries.append((total if known.has_rows else 1, count))
        local, rest = divmod(size, len(rows) if known.has_rows else 1)
        if rest:
            return None
        if known.has_rows:
            of_rows = None if len(rows) == total else (dim, rows.start, len(rows))
        is_of_tokens = known.tokens is not None and (known.fixed, known.each) == (0, 1)
        held = count
        if is_of_tokens and (places is not None or parts.axis.size > 1):
            runs = parts.runs(count) if places is None else next(places, ())
            size_of_runs = sum(run.size for run in runs)
            if places is None and size_of_runs == count:  # two tokens, of which a rank has two with padding, or both
                return None
            if places is not None or local in (size_of_runs, -(-size_of_runs // tp.size)):
                of_runs.append((dim, runs))
                held = size_of_runs
        if local == held:
            continue
        if known.tokens is None and local * shares == count and of_channels is None:
            of_channels = dim, share * local, local
        elif shares_tokens and is_of_tokens and local == -(-held // tp.size):
            of = dim if known.has_rows else dim - 1
            if of_tokens is not None or of < 0 or (of < dim and form[of] != Dim(has_rows=True, fixed=1)):
                return None
            of_tokens = of, dim, local
        else:
            return None
    shape = tuple(rows * count for rows, count in entries)
    return DrawnPart(shape, tuple(entries), of_rows, of_channels, tuple(of_runs), of_tokens, (tp.rank, tp.size))


def draw_part(part: DrawnPart | None, kernel: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw a whole tensor, and keep a part of it. The blocks of an attention draw it once.

    A part that is not known is drawn alone. It leaves the state after one number, the same on all ranks.

    Raises:
        PlanError: if the memory has no room for the whole tensor.
    """
    if part is None:
        generator = generator_of(args, kwargs)
        before = generator.get_state()
        drawn = kernel(*args, **kwargs)
        generator.set_state(before)
        advance(generator)
        return drawn
    x: Tensor = args[0]

    def draw() -> Tensor:
        # A kernel may draw in the order of the memory.
        order = sorted(range(x.ndim), key=x.stride, reverse=True) if not x.is_contiguous() else list(range(x.ndim))
        memory = x.new_empty([part.shape[dim] for dim in order])
        whole = memory.permute([order.index(dim) for dim in range(x.ndim)])
        rest = [_whole_of(part, value.expand(x.shape)) if isinstance(value, Tensor) else value for value in args[1:]]
        kernel(whole, *rest, **kwargs)
        return whole

    try:
        blocks = running_blocks()
        if blocks is None or any(isinstance(value, Tensor) for value in args[1:]):
            return x.copy_(part.of(draw()))
        what = part.shape, x.dtype, args[1:]
        return x.copy_(part.of(blocks.once(generator_of(args, kwargs), what, draw)))
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "you tried to allocate" not in str(error):
            raise
        raise PlanError(
            f"the memory of {x.device} has no room for the random numbers of the whole batch, shape {part.shape}, of "
            f"which this rank keeps {tuple(x.shape)}. With draws='device' each rank draws the numbers of one device. "
            "Use smaller micro-batches; or ToDistributedConfig(draws='rank'), with which it draws its own alone"
        ) from error


def _whole_of(part: DrawnPart, own: Tensor) -> Tensor:
    """Return the probabilities of a whole draw, of which those of other ranks do not matter."""
    whole = own.new_full(part.shape, 0.5)
    places = part.of(torch.arange(whole.numel(), device=own.device).view(part.shape), fill=-1)
    is_drawn = places >= 0  # otherwise padding
    return whole.view(-1).index_copy(0, places[is_drawn], own[is_drawn]).view(part.shape)


def is_dense(x: Tensor) -> bool:
    """Return whether a tensor has its elements one after the other, whatever the order of its dims."""
    expected = 1
    for stride, size in sorted((x.stride(dim), x.shape[dim]) for dim in range(x.ndim) if x.shape[dim] != 1):
        if stride != expected:
            return False
        expected *= size
    return True
