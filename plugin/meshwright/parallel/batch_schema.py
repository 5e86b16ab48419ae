"""What the arguments of a forward call hold: which dim of each has the rows of the batch, and what a row has there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import mode

import torch
from torch import Tensor

from meshwright.errors import PlanError
from meshwright.parallel.mean_over_ranks import TARGETS, without_targets

Batch = Mapping[str, object]  # the arguments by name
RowDim = tuple[int, Sequence[int]]  # a dim, and where each row begins along it, and the last one ends

TOKENS = ("input_ids", "inputs_embeds")
PER_TOKEN = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "special_tokens_mask")


class BatchSchema:
    """Says of each argument of a forward call along which dim it has the batch's rows.

    ::

        [rows, ...]               tokens, labels, one image per row
        [3 or 4, rows, tokens]    positions in time, height and width
        [patches, ...]            patches of one image per row, beside the images' sizes [rows, 3] in patches

    Values without rows, such as numbers, vectors and tensors of one row, belong to each row.

    Args:
        batch: the arguments by name.
    """

    def __init__(self, batch: Batch):
        self.batch = batch
        tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor) and x.ndim}
        dense = {name: x for name, x in tensors.items() if x.layout is torch.strided and not x.is_nested}
        self.tensors = dense or tensors  # a sparse tensor beside dense ones may describe the whole batch
        self.targets = next((tensors[name] for name in TARGETS if name in tensors), None)

    @property
    def tokens(self) -> Tensor:
        """The argument that has a token in each place, ``[rows, tokens, ...]``.

        Raises:
            PlanError: if the call has none.
        """
        for name in TOKENS:
            if name in self.tensors:
                return self.tensors[name]
        raise PlanError("the model was called without input_ids or inputs_embeds")

    @property
    def has_tokens(self) -> bool:
        return not self.tensors.keys().isdisjoint(TOKENS)

    @property
    def rows(self) -> int:
        """The number of rows: that of the targets, else of the tokens, else of most tensors."""
        if self.targets is not None or self.has_tokens:
            return (self.tokens if self.targets is None else self.targets).shape[0]
        return mode(x.shape[0] for x in self.tensors.values()) if self.tensors else 0

    @property
    def per_token(self) -> tuple[Tensor, ...]:
        """The tensors with a value for each token, ``[rows, tokens, ...]``."""
        shape = self.tokens.shape[:2]
        return tuple(x for x in self.tensors.values() if x.shape[:2] == shape)

    @property
    def of_towers(self) -> list[str]:
        """The names of the inputs of towers, such as pixels: the real numbers that are not of tokens."""
        others = (*TOKENS, *TARGETS, *PER_TOKEN)
        return sorted(name for name, x in self.tensors.items() if x.is_floating_point() and name not in others)

    @functools.cached_property
    def row_dims(self) -> dict[str, RowDim]:
        """Along which dim each tensor has the rows, without those that have none."""
        found = {name: self._row_dim(name, x) for name, x in self.tensors.items()}
        return {name: dim for name, dim in found.items() if dim is not None}

    def of_rows(self, name: str, low: int, high: int) -> Tensor:
        """Return the part of a tensor that belongs to the rows from ``low`` to ``high - 1``."""
        dim, starts = self.row_dims[name]
        return self.tensors[name].narrow(dim, starts[low], starts[high] - starts[low])

    def row_counts(self, count: int) -> list[int]:
        """Return the number of rows of each of ``count`` micro-batches."""
        rows = self.rows
        return [(i + 1) * rows // count - i * rows // count for i in range(count)]

    def split(self, count: int) -> list[dict[str, object]]:
        """Return the arguments of each micro-batch. One without rows gets a row that no loss counts.

        Args:
            count: the number of micro-batches.

        Raises:
            PlanError: if a tensor has something else than rows, so that its part of each micro-batch is unknown.
        """
        rows = self.rows
        if count == 1 and rows:
            return [dict(self.batch)]
        for name, x in self.batch.items():
            if not isinstance(x, Tensor) or x.ndim < 2 or name in self.row_dims:
                continue
            if x.is_nested or x.shape[0] > 1:
                form = "rows of several lengths" if x.is_nested else f"shape {tuple(x.shape)}"
                raise PlanError(
                    f"{name} has {form} in a batch of {rows} rows, so it is not known which part of it "
                    "belongs to which micro-batch. Give each row one image, or set "
                    "ParallelPlan(gradient_accumulation_steps=1, micro_batch_size=None)"
                )
        pieces = []
        for low, high in pairwise([0, *accumulate(self.row_counts(count))]):
            own = {name: self.of_rows(name, low, min(max(high, low + 1), rows)) for name in self.row_dims}
            piece = {**self.batch, **own}
            pieces.append(without_targets(piece) if low == high else piece)
        return pieces

    def _row_dim(self, name: str, x: Tensor) -> RowDim | None:
        rows = self.rows
        if x.is_floating_point() and x.ndim > 1 and (patches := self._patches_of_rows(x)) is not None:
            return 0, patches
        is_of_tokens = self.has_tokens and not x.is_floating_point() and x.shape[1:] == self.tokens.shape[:2]
        if is_of_tokens and (x.shape[0] != rows or name == "position_ids"):
            return 1, range(rows + 1)
        return (0, range(rows + 1)) if x.shape[0] == rows else None

    def _patches_of_rows(self, x: Tensor) -> list[int] | None:
        """Return where the patches of each row begin and end, if the batch has the sizes of one image per row."""
        for sizes in self.tensors.values():
            is_sizes = sizes.ndim == 2 and sizes.shape[1] == 3 and sizes.dtype in (torch.int32, torch.int64)
            if is_sizes and sizes.shape[0] == self.rows != x.shape[0]:
                ends = [0, *accumulate(sizes.prod(-1).tolist())]
                if ends[-1] == x.shape[0]:
                    return ends
        return None


def example(signature: inspect.Signature, *, rows: int, length: int) -> dict[str, object]:
    """Return a batch of tokens alone, with the masks, positions and labels that a forward requires and without a cache.

    Args:
        signature: the signature of forward.
        rows: the number of rows.
        length: the number of tokens in each row.
    """
    required = [
        name for name, x in signature.parameters.items() if x.default is x.empty and name in (*PER_TOKEN, "labels")
    ]
    batch: dict[str, object] = {name: torch.full((rows, length), int("mask" in name)) for name in required}
    optional = {"input_ids": torch.zeros(rows, length, dtype=torch.int64), "use_cache": False}
    return {**batch, **{name: x for name, x in optional.items() if name in signature.parameters}}
