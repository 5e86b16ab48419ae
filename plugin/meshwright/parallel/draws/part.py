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
from meshwright.parallel.draws.kernels import Call
from meshwright.parallel.draws.sites import Dim, Form


@dataclass(frozen=True)
class DrawnPart:
    """A part of a tensor that one device would draw.

    Args:
        shape: the shape of the whole tensor.
        entries: for each dim, the numbers of its rows and of the entries of each row; without the rows, of 1 row.
        rows: the dim with the rows and the first and the number of those that are kept; None if all are.
        channels: the dim of which some entries of each row are kept, the first and the number of them; None for all.
        tokens: the dim of the rows, that of the tokens, which may be the same, and how many tokens of a row each rank
            has, if the ranks of tp share the tokens of all rows, one row after the other; None if each has all.
        tp: this rank of tp, and the number of them.
    """

    shape: tuple[int, ...]
    entries: tuple[tuple[int, int], ...]
    rows: tuple[int, int, int] | None = None
    channels: tuple[int, int, int] | None = None
    tokens: tuple[int, int, int] | None = None
    tp: tuple[int, int] = (0, 1)

    @property
    def is_whole(self) -> bool:
        return self.rows is self.channels is self.tokens is None

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of a whole tensor, of the shape that the rank draws."""
        split = whole.reshape([size for pair in self.entries for size in pair])  # dims 2 i and 2 i + 1
        if self.rows is not None:
            split = split.narrow(2 * self.rows[0], *self.rows[1:])
        if self.channels is not None:
            split = split.narrow(2 * self.channels[0] + 1, *self.channels[1:])
        sizes = [split.shape[i] * split.shape[i + 1] for i in range(0, split.ndim, 2)]
        if self.tokens is None:
            return split.reshape(sizes)
        of_rows, dim, local = self.tokens
        rank, ranks = self.tp
        rows, length = split.shape[2 * of_rows], split.shape[2 * dim + 1]
        flat = split.flatten(2 * of_rows, 2 * dim + 1).movedim(2 * of_rows, 0)
        padding = rows * (ranks * local - length)
        flat = F.pad(flat, (*(0, 0) * (flat.ndim - 1), 0, padding)).narrow(0, rank * rows * local, rows * local)
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
        shares_tokens: whether its ranks may have parts of tokens.
    """
    entries: list[tuple[int, int]] = []
    of_rows = of_channels = of_tokens = None
    for dim, size in enumerate(own):
        known, count = form[dim], form[dim].entries(lengths)
        has_tokens = known.tokens is not None and (known.fixed, known.each) == (0, 1)
        entries.append((total if known.has_rows else 1, count))
        local, rest = divmod(size, len(rows) if known.has_rows else 1)
        if known.has_rows:
            of_rows = None if len(rows) == total else (dim, rows.start, len(rows))
        if rest or local == count:
            if rest:
                return None
            continue
        if known.tokens is None and local * tp.size == count and of_channels is None:
            of_channels = dim, tp.rank * local, local
        elif shares_tokens and has_tokens and local == -(-count // tp.size):
            of = dim if known.has_rows else dim - 1
            if of_tokens is not None or of < 0 or (of < dim and form[of] != Dim(has_rows=True, fixed=1)):
                return None
            of_tokens = of, dim, local
        else:
            return None
    shape = tuple(rows * count for rows, count in entries)
    return DrawnPart(shape, tuple(entries), of_rows, of_channels, of_tokens, (tp.rank, tp.size))


def draw_part(part: DrawnPart, kernel: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw a whole tensor, and keep a part of it.

    Raises:
        PlanError: if the memory has no room for the whole tensor.
    """
    x: Tensor = args[0]
    try:
        # A kernel may draw in the order of the memory.
        order = sorted(range(x.ndim), key=x.stride, reverse=True) if not x.is_contiguous() else list(range(x.ndim))
        memory = x.new_empty([part.shape[dim] for dim in order])
        whole = memory.permute([order.index(dim) for dim in range(x.ndim)])
        rest = [_whole_of(part, value.expand(x.shape)) if isinstance(value, Tensor) else value for value in args[1:]]
        kernel(whole, *rest, **kwargs)
        return x.copy_(part.of(whole))
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
    places = part.of(torch.arange(whole.numel(), device=own.device).view(part.shape))
    return whole.view(-1).index_copy(0, places.flatten(), own.flatten()).view(part.shape)


def is_dense(x: Tensor) -> bool:
    """Return whether a tensor has its elements one after the other, whatever the order of its dims."""
    expected = 1
    for stride, size in sorted((x.stride(dim), x.shape[dim]) for dim in range(x.ndim) if x.shape[dim] != 1):
        if stride != expected:
            return False
        expected *= size
    return True
