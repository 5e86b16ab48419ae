"""Describes the model's tensor parallelism to DeepSpeed, by an ``mpu`` object and a mark on parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from meshwright.errors import PlanError
from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import layout_of
from meshwright.mesh.axes import Axis


class ModelParallelUnit:
    """Describes the mesh to DeepSpeed; it has the methods of Megatron's model-parallel unit (``mpu``).

    Args:
        tp: the axis over which layers are sharded; DeepSpeed calls it model parallel.
        dp: the axis over which DeepSpeed averages gradients and shards states.
    """

    def __init__(self, tp: Axis, dp: Axis):
        self._tp, self._dp = tp, dp

    def get_model_parallel_rank(self) -> int:
        return self._tp.rank

    def get_model_parallel_world_size(self) -> int:
        return self._tp.size

    def get_model_parallel_group(self) -> ProcessGroup | None:
        return _group_of(self._tp)

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self._dp.rank

    def get_data_parallel_world_size(self) -> int:
        return self._dp.size

    def get_data_parallel_group(self) -> ProcessGroup | None:
        return _group_of(self._dp)


def _group_of(axis: Axis) -> ProcessGroup | None:
    """Return the process group of an axis; the world's group if there is only one process."""
    return axis.group if axis.group is not None else dist.group.WORLD


def mark_parameters(model: nn.Module) -> None:
    """Mark on each parameter whether this rank's gradient counts in DeepSpeed's norm.

    For parameters with ``tensor_model_parallel``, DeepSpeed adds the norms of all model-parallel ranks. For other
    parameters it uses only the norm of rank 0. A key/value head that several ranks hold is marked only on the first of
    these ranks, so that it counts once.
    """
    for parameter in model.parameters():
        layout = layout_of(parameter)
        if layout.is_sharded:
            parameter.tensor_model_parallel = holds_first(layout.over("tp"), layout.rank("tp"))  # type: ignore[attr-defined]


def holds_first(rows: RowLayout, rank: int) -> bool | None:
    """Return whether the rank is the first to hold its rows; None if this is true for only some of the rows.

    Example:
        >>> one_kv_head = RowLayout(0, 8, (((0, 8),), ((0, 8),)))
        >>> holds_first(one_kv_head, 0), holds_first(one_kv_head, 1)
        (True, False)
    """
    times = torch.zeros(rows.size, dtype=torch.int32)
    for spans in rows.spans[: rank + 1]:
        for start, stop in spans:
            times[start:stop] += 1
    own = torch.zeros(rows.size, dtype=torch.int32)
    for start, stop in rows.spans[rank]:
        own[start:stop] += 1
    if bool((own > 1).any()):
        return None
    is_first = times[own > 0] == 1
    return None if is_first.any() and not is_first.all() else bool(is_first.all())


def check_norms(layouts: dict[str, RowLayout]) -> None:
    """Raise if DeepSpeed cannot count each row of the sharded parameters once in its gradient norm.

    Raises:
        PlanError: if there is such a parameter; the message names it.
    """
    for name, rows in layouts.items():
        if not rows.is_replicated and any(holds_first(rows, rank) is None for rank in range(len(rows.spans))):
            raise PlanError(
                f"{name}: with tp={len(rows.spans)} some ranks hold key/value heads of their own next to ones that "
                "another rank holds too, but DeepSpeed counts a parameter in the gradient norm wholly or not at all. "
                "Use a ParallelPlan.tp that divides the number of key/value heads (or, for separate k and v "
                "projections, a multiple of it), or to_distributed without DeepSpeed"
            )
