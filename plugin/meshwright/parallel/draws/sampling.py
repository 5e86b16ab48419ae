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
from meshwright.faults.memory_digest import value_digest
from meshwright.mesh.axes import Axis
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.parallel.batch.share import BatchShare, first_row
from meshwright.parallel.draws.kernels import Call, digest_of, generator_of
from meshwright.parallel.draws.part import DrawnPart, draw_part, is_dense

_LEFT_OUT = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/"
_SAMPLES = os.path.join("transformers", "generation", "utils.py")  # which samples by torch.multinomial


@dataclass(frozen=True)
class HeldRows:
    """The rows of a global batch that a rank has.

    Args:
        held: their number.
        first: the first of them.
        total: the number of all rows.
    """

    held: int
    first: int
    total: int

    @classmethod
    def of(cls, batch: Mapping[str, Any], dp: Axis) -> Self | None:
        """Return the rows of which the loader's tensors in a batch are; None if it has none with all of this rank's."""
        for x in BatchSchema(batch).tensors.values():
            base = x if x._base is None else x._base
            share = BatchShare.of([x])
            if share is not None and x.ndim == base.ndim and len(x) == len(base) == share.held:
                return cls(share.held, first_row(dp, share.held, share.total), share.total)
        return None

    @property
    def are_all(self) -> bool:
        return self.held == self.total

    def part(self, shape: Sequence[int], *copies: int) -> DrawnPart | None:
        """Return the part of a draw that this rank keeps; None if the first dim does not have its rows.

        Args:
            shape: the shape of what the rank draws.
            copies: the numbers of entries that the first dim may have for each row.
        """
        if not shape or shape[0] not in [self.held * count for count in copies]:
            return None
        each = shape[0] // self.held
        entries = (self.total, each), *((1, size) for size in shape[1:])
        return DrawnPart((self.total * each, *shape[1:]), entries, rows=(0, self.first, self.held))


@dataclass(frozen=True)
class Generation:
    """A call of ``generate``.

    Args:
        batch: its arguments by name.
        samples: whether it samples tokens.
        copies: the number of texts for each row.
        rows: the rows of the global batch; all are this rank's for prompts that are not of a loader's batch.
    """

    batch: dict[str, Any]
    samples: bool
    copies: int
    rows: HeldRows

    @classmethod
    def of(cls, model: nn.Module, batch: dict[str, Any], dp: Axis) -> Self:
        """Return the call with these arguments."""
        config = batch.get("generation_config") or getattr(model, "generation_config", None)

        def option(name: str, default: Any) -> Any:
            value = batch.get(name)
            return (getattr(config, name, None) or default) if value is None else value

        if (rows := HeldRows.of(batch, dp)) is None:
            own = max(1, BatchSchema(batch).rows)
            rows = HeldRows(own, 0, own)
        return cls(batch, bool(option("do_sample", False)), int(option("num_return_sequences", 1)), rows)

    def part(self, shape: Sequence[int]) -> DrawnPart | None:
        """Return the part of a draw of tokens that this rank keeps; None if its first dim does not have the rows."""
        return self.rows.part(shape, 1, self.copies)

    def digest(self, state: str) -> str:
        """Return a digest of the prompts and of a random state."""
        tensors = sorted(BatchSchema(self.batch).tensors.items())
        prompts = "".join(f"{name} {tuple(x.shape)} {value_digest(x):x} " for name, x in tensors)
        return f" {hashlib.blake2b((state + prompts).encode(), digest_size=8).hexdigest()}"


@dataclass
class RowDraws:
    """The draws of a generator for all rows of a batch.

    Args:
        rows: the rows of this rank.
        copies: the number of entries of the first dim for each row.
    """

    rows: HeldRows
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
            part = self.rows.part(x.shape, self.copies)
        if part is None:
            raise PlanError(
                f"a generator of mw.sampling_generator draws for the {self.rows.held} rows of a batch"
                f"{f', {self.copies} times each' if self.copies > 1 else ''}, but was asked for shape "
                f"{tuple(x.shape)}. Draw with the rows in the first dim, pass copies= for several entries of each row, "
                "or use a torch.Generator"
            )
        drawn = draw_part(part, kernel, args, kwargs)
        self._last = digest_of(generator)
        return drawn


def samples_tokens(frame: FrameType | None) -> bool:
    """Return whether a frame draws the tokens of ``generate``, and not what a processor of logits draws."""
    while frame is not None and frame.f_code.co_filename.startswith(_LEFT_OUT):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith(_SAMPLES)
