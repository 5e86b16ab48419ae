"""The MLP: one or two projections to an inner width, cut evenly, and one projection back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from meshwright.errors import PlanError
from meshwright.layout.row_layout import RowLayout
from meshwright.roles.blocks.block import Block, direct_projections, split_projections
from meshwright.roles.linear_kernel import in_features, out_features
from meshwright.roles.sharding_plan import Role

_DOWN_NAMES = {"down_proj", "fc2", "lin2", "linear2", "linear_fc2", "w2", "dense_4h_to_h", "fc_out"}


def _even(block: Block, _: int) -> RowLayout:
    return RowLayout.even(block.width, block.tp)


class Mlp(Block):
    """An MLP, or the projections of one in a layer that owns them directly."""

    rows: ClassVar = {
        Role.GATE_UP: lambda block, _: RowLayout.even(2 * block.width, block.tp, parts=(block.width, block.width)),
        **dict.fromkeys((Role.GATE, Role.UP, Role.DOWN, Role.INNER_NORM), _even),
    }

    def rows_of(self, name: str, role: Role, size: int) -> RowLayout:
        if self.width % self.tp:
            raise PlanError(
                f"{name}: its width {self.width} cannot be divided over tp={self.tp}; change ParallelPlan.tp"
            )
        return super().rows_of(name, role, size)

    @classmethod
    def claim(cls, module: nn.Module, hidden: int, hinted: Mapping[str, Role]) -> dict[str, Role]:
        linears = direct_projections(module) or split_projections(module)
        if all(in_features(m) == out_features(m) == hidden for m in linears.values()):  # shapes do not tell the rows
            rows = {n: m for n, m in linears.items() if n.lower().rpartition(".")[2] in _DOWN_NAMES}
        else:
            rows = {n: m for n, m in linears.items() if out_features(m) == hidden and in_features(m) != hidden}
        columns = {n: m for n, m in linears.items() if in_features(m) == hidden and n not in rows}
        if len(rows) != 1 or len(columns) not in (1, 2) or len(rows) + len(columns) != len(linears):
            return {}
        [(down, output)] = rows.items()
        fused = {n for n in columns if hinted.get(n) is Role.GATE_UP}
        if any(out_features(m) != in_features(output) * (1 + (n in fused)) for n, m in columns.items()):
            return {}
        # Gate and up are cut alike, so which of the two is the gate does not matter.
        found = zip(columns, (Role.UP, Role.GATE), strict=False)
        return {"": Role.MLP, down: Role.DOWN} | {n: Role.GATE_UP if n in fused else role for n, role in found}
