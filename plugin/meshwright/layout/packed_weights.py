"""Frozen weights that bitsandbytes stores in 4 or 8 bits, and how a rank's part of one has the values of one device.

An element of a 4-bit weight holds several values, and each block of consecutive values has a statistic: their largest
magnitude. A rank that has whole blocks with the statistics of the whole weight computes the same values from them as
one device does, bit for bit. An 8-bit weight has one statistic for each row. The classes are known by their attributes,
since ``meshwright`` does not import bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.layout.row_layout import RowLayout

Attribute = tuple[dict[str, Any], str, Any]  # the dict of an object that has an attribute, its name, and its value


@dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    """How a weight is stored.

    Args:
        shape: the shape of the weight's matrix, [out, in].
        values: the number of values in a stored element.
        block: the number of consecutive values of the flattened matrix that share a statistic; 1 if each row has one.
    """

    shape: torch.Size
    values: int
    block: int

    @staticmethod
    def of(weight: Tensor | None) -> PackedMatrix | None:
        """Return how a weight is stored; None if its elements are its values."""
        own = getattr(weight, "__dict__", {})
        state = own.get("quant_state")
        if state is not None and len(state.shape) == 2:
            assert weight is not None
            return PackedMatrix(shape=torch.Size(state.shape), values=2 * weight.element_size(), block=state.blocksize)
        if weight is not None and "SCB" in own and weight.dtype == torch.int8:
            return PackedMatrix(shape=weight.shape, values=1, block=1)
        return None

    @property
    def stored_shape(self) -> torch.Size | None:
        """The shape of the matrix of stored elements; None if an element has values of two rows."""
        rows, columns = self.shape
        return torch.Size((rows, columns // self.values)) if columns % self.values == 0 else None

    def stored_rows(self, rows: RowLayout, name: str) -> RowLayout:
        """Return which rows of the matrix of stored elements each rank holds.

        Args:
            rows: which rows or columns of the matrix each rank holds.
            name: the name of the weight, for messages.

        Raises:
            PlanError: if a rank would hold a part of a block, for which there is no statistic.
        """
        if rows.is_replicated:
            return RowLayout.replicated(self.shape[0], len(rows.spans))
        width = self.shape[1] if rows.dim == 0 else 1  # the values between two borders that follow each other
        borders = [border for spans in rows.spans for span in spans for border in span]
        is_split = any(border * width % self.block for border in borders) or (rows.dim and self.shape[1] % self.block)
        if is_split or self.stored_shape is None:
            raise PlanError(self._split_block(rows, name))
        if rows.dim == 0:
            return rows
        return _scaled(rows, 1, self.values)

    def _split_block(self, rows: RowLayout, name: str) -> str:
        tp, what = len(rows.spans), ("rows", "columns")[rows.dim]
        fitting = [n for n in range(2, tp) if self.shape[1] % (n * self.block) == 0 and tp % n == 0]
        smaller = f"ParallelPlan(tp={fitting[-1]})" if fitting else "ParallelPlan(tp=1)"
        return (
            f"{name} is a quantised {list(self.shape)} matrix with a statistic for each {self.block} consecutive "
            f"values, and tp={tp} gives a rank {rows.real_rows(0)} of its {self.shape[rows.dim]} {what}, which splits "
            f"such a block. The values of a rank's part would not be those of one device. Use {smaller}, or load this "
            "layer unquantised: BitsAndBytesConfig(llm_int8_skip_modules=[...])"
        )

    def statistics(self, whole: Tensor, rows: RowLayout, rank: int) -> Tensor:
        """Return the statistics of a rank's blocks.

        Args:
            whole: the statistics of all blocks.
            rows: which rows of the matrix of stored elements each rank holds.
            rank: the rank.
        """
        if rows.is_replicated:
            return whole
        if self.block == 1:
            return rows.take(whole, rank) if rows.dim == 0 else whole
        if rows.dim == 0:
            return _scaled(rows, self.shape[1], self.block).take(whole.view(-1), rank)
        of_blocks = _scaled(rows, self.values, self.block)
        return of_blocks.take(whole.view(self.shape[0], -1), rank).view(-1)


def _scaled(rows: RowLayout, factor: int, divisor: int) -> RowLayout:
    spans = tuple(
        tuple((start * factor // divisor, stop * factor // divisor) for start, stop in own) for own in rows.spans
    )
    return RowLayout(rows.dim, rows.size * factor // divisor, spans)


def matrix_shape(weight: Tensor) -> torch.Size:
    """Return the shape of a weight's values."""
    packing = PackedMatrix.of(weight)
    return weight.shape if packing is None else packing.shape


def stored_shape(weight: Tensor) -> torch.Size:
    """Return the shape in which a distributed model stores a weight; for a packed one that of a matrix, if it has one.

    bitsandbytes itself stores a column of elements, and takes any shape.
    """
    packing = PackedMatrix.of(weight)
    return (None if packing is None else packing.stored_shape) or weight.shape


def packed_modules(model: nn.Module | Facts) -> Iterator[tuple[str, Any, PackedMatrix]]:
    """Yield the modules with a packed weight: the name, the module, and how its weight is stored."""
    for module, name in Facts.of(model).names.items():
        packing = PackedMatrix.of(module._parameters.get("weight"))
        if packing is not None:
            yield name, module, packing


def statistics_of(model: nn.Module | Facts) -> list[Tensor]:
    """Return the statistics of all packed weights of a model."""
    found: list[Tensor | None] = []
    for _, module, packing in packed_modules(model):
        if packing.block == 1:
            found += [module.weight.SCB, module.state.SCB]
            continue
        state = module.weight.quant_state
        found += [state.absmax, state.offset, *([state.state2.absmax] if state.nested else [])]
    return [x for x in found if x is not None]


def state_without_packed(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict, without packed weights and their statistics.

    These are frozen, and belong to the checkpoint that they were loaded from.
    """
    packed = {f"{name}.".lstrip(".") for name, _, _ in packed_modules(model)}
    own = {id(p) for p in model.parameters() if PackedMatrix.of(p) is None}
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if not packed:
        return state
    return {name: x for name, x in state.items() if id(x) in own or not name.startswith(tuple(packed))}


def packed_without_values(model: nn.Module | Facts) -> dict[str, Tensor]:
    """Return the packed weights on the meta device, by name."""
    found = {f"{name}.weight".lstrip("."): module.weight for name, module, _ in packed_modules(model)}
    return {name: weight for name, weight in found.items() if weight.is_meta}
