"""Derive from a parameter's role in its block which of the parameter's rows each rank of the TP axis holds."""

from __future__ import annotations

from meshwright.errors import PlanError
from meshwright.layout.row_layout import RowLayout
from meshwright.parallel.head_layout import HeadLayout
from meshwright.roles.sharding_plan import MLP_COLUMN_ROLES, ROW_ROLES, WIDE_NORM_ROLES, Role


def rows_of(name: str, shape: tuple[int, ...], role: Role, heads: HeadLayout | None, width: int, tp: int) -> RowLayout:
    """Return which rows of a block's parameter each rank holds; a projection's weight is ``[out, in]``.

    Args:
        name: the parameter's name, for messages.
        heads: the block's head layout, if it is an attention block.
        width: the input width of the block's output projection.

    Raises:
        PlanError: if the rows cannot be divided over ``tp`` ranks.
    """
    if role in (Role.HEAD_NORM, Role.SHARED) or (role in ROW_ROLES and len(shape) == 1):
        return RowLayout.replicated(shape[0] if shape else 1, tp)
    if role in ROW_ROLES:
        rows = heads.query_rows() if heads else RowLayout.even(_divisible(name, width, tp), tp)
        return RowLayout(1, rows.size, rows.spans)
    if role in WIDE_NORM_ROLES:
        return wide_rows(name, role, heads, width, tp)
    if role is Role.GATE_UP:
        half = _divisible(name, width, tp)
        return RowLayout.even(2 * half, tp, parts=(half, half))
    if role in MLP_COLUMN_ROLES:
        return RowLayout.even(_divisible(name, width, tp), tp)
    assert heads is not None
    if role is Role.PER_HEAD:
        size = max(shape[0] // heads.heads, 1) * heads.heads
        return RowLayout.even(size, tp)
    return _ROWS_BY_HEAD[role](heads)


_ROWS_BY_HEAD = {
    Role.Q: HeadLayout.query_rows,
    Role.K: HeadLayout.kv_rows,
    Role.V: HeadLayout.kv_rows,
    Role.QKV: HeadLayout.fused_rows,
    Role.QKV_BY_GROUP: HeadLayout.grouped_rows,
    Role.QKV_IN_FOUR: HeadLayout.rows_in_four,
}


def wide_rows(name: str, role: Role, heads: HeadLayout | None, width: int, tp: int) -> RowLayout:
    """Return which rows of a norm over a sharded width each rank holds."""
    if heads is not None:
        return heads.kv_rows() if role is Role.K_NORM else heads.query_rows()
    return RowLayout.even(_divisible(name, width, tp), tp)


def _divisible(name: str, size: int, tp: int) -> int:
    if size % tp:
        raise PlanError(f"{name}: its width {size} cannot be divided over tp={tp}; change ParallelPlan.tp")
    return size
