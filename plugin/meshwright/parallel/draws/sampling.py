"""Which rows a rank samples tokens for, in ``generate`` and in loops of the program.

::

    one device   step t: exponential numbers [4 rows, vocabulary], a token of each row
    rank 0       the same numbers of 4 rows, of which it takes those of rows 0 and 1
    rank 1       the same numbers of 4 rows, of which it takes those of rows 2 and 3
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Generator, Tensor, nn

from meshwright.errors import PlanError
from meshwright.mesh.axes import Axis
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.parallel.batch.share import BatchShare
from meshwright.parallel.draws.kernels import Call, digest_of, generator_of
from meshwright.parallel.draws.part import DrawnPart, draw_part, is_dense

_LEFT_OUT = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/"
_SAMPLES = os.path.join("transformers", "generation", "utils.py")  # which samples by torch.multinomial


@dataclass(frozen=True)
class Generation:
    """A call of ``generate``.

    Args:
        batch: its arguments by name.
        samples: whether it samples tokens.
        copies: the number of texts for each row.
        held: the number of this rank's rows.
        first: the first of these rows in the global batch.
        total: the number of rows of the global batch; ``held`` for prompts that are not of a loader's batch.
    """

    batch: dict[str, Any]
    samples: bool
    copies: int
    held: int
    first: int
    total: int

    @classmethod
    def of(cls, model: nn.Module, batch: dict[str, Any], dp: Axis) -> Self:
        """Return the call with these arguments."""
        config = batch.get("generation_config") or getattr(model, "generation_config", None)

        def option(name: str, default: Any) -> Any:
            value = batch.get(name)
            return (getattr(config, name, None) or default) if value is None else value

        held, first, total = rows_of(batch, dp) or (max(1, BatchSchema(batch).rows), 0, 0)
        return cls(
            batch, bool(option("do_sample", False)), int(option("num_return_sequences", 1)), held, first, total or held
        )

    def part(self, shape: Sequence[int]) -> DrawnPart | None:
        """Return the part of a draw of tokens that this rank keeps; None if its first dim does not have the rows."""
        return _part(shape, (self.held, self.held * self.copies), self.held, self.first, self.total)

    def digest(self, state: str) -> str:
        """Return a digest of the prompts and of a random state."""
        digest = hashlib.blake2b(state.encode(), digest_size=8)
        for name, x in sorted(BatchSchema(self.batch).tensors.items()):
            digest.update(f"{name} {tuple(x.shape)}".encode())
            digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return f" {digest.hexdigest()}"


@dataclass
class RowDraws:
    """The draws of a generator for all rows of a batch.

    Args:
        held: the number of this rank's rows.
        first: the first of them.
        total: the number of all rows.
        copies: the number of entries of the first dim for each row.
    """

    held: int
    first: int
    total: int
    copies: int
    _last: bytes | None = None  # the digest of the generator's state after the last draw

    def draw(self, kernel: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a draw.

        Raises:
            PlanError: if its first dim does not have the rows, or if another draw was made by a kernel of its own.
        """
        generator: Generator = generator_of(args, kwargs)
        if self._last is not None and self._last != digest_of(generator):
            raise PlanError(
                "a generator of mw.sampling_generator has drawn inside of a kernel, as torch.multinomial with "
                "replacement and torch.poisson do, where a rank cannot draw for all rows. Use torch.multinomial "
                "without replacement, or torch.rand and its kind"
            )
        x: Tensor = kwargs.get("out", args[0])
        part = None
        if "out" not in kwargs and is_dense(x):
            part = _part(x.shape, (self.held * self.copies,), self.held, self.first, self.total)
        if part is None:
            raise PlanError(
                f"a generator of mw.sampling_generator draws for the {self.held} rows of a batch"
                f"{f', {self.copies} times each' if self.copies > 1 else ''}, but was asked for shape "
                f"{tuple(x.shape)}. Draw with the rows in the first dim, pass copies= for several entries of each row, "
                "or use a torch.Generator"
            )
        drawn = draw_part(part, kernel, args, kwargs)
        self._last = digest_of(generator)
        return drawn


def rows_of(batch: Mapping[str, Any], dp: Axis) -> tuple[int, int, int] | None:
    """Return the number of this rank's rows of the batch that the loader has yielded last, the first of them, and the
    number of all; None if no argument is a tensor of it, or has all of the rows that this rank has of one."""
    for x in BatchSchema(batch).tensors.values():
        base = x if x._base is None else x._base
        share = BatchShare.of([x])
        if share is not None and x.ndim == base.ndim and len(x) == len(base) == share.held:
            return share.held, min(dp.rank * share.total // dp.size, share.total - share.held), share.total
    return None


def samples_tokens(frame: FrameType | None) -> bool:
    """Return whether a frame draws the tokens of ``generate``, and not what a processor of logits draws."""
    while frame is not None and frame.f_code.co_filename.startswith(_LEFT_OUT):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith(_SAMPLES)


def _part(shape: Sequence[int], sizes: Sequence[int], held: int, first: int, total: int) -> DrawnPart | None:
    if not shape or shape[0] not in sizes:
        return None
    each = shape[0] // held
    entries = (total, each), *((1, size) for size in shape[1:])
    return DrawnPart((total * each, *shape[1:]), entries, rows=(0, first, held))
