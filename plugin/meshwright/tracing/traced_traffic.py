"""Counts a step's collectives and their bytes per mesh axis, where torch dispatches them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.mesh.axes import Axis

KINDS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
}


@dataclass
class Traffic:
    """The collectives over one axis: the number of each kind, and the bytes of their whole (gathered) tensors.

    Of the messages between two ranks, only the sends are counted.
    """

    counts: Counter[str] = field(default_factory=Counter)
    bytes: int = 0

    def __str__(self) -> str:
        counts = " + ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        return f"{counts or 'none'}, {self.bytes / 2**20:.1f} MiB"


class TracedAxis(TorchDispatchMode):
    """Counts every collective over each axis inside this context.

    Args:
        axes: the axes of the mesh. A collective over a part of an axis counts for the first axis that holds its ranks.
    """

    def __init__(self, *axes: Axis):
        super().__init__()
        self._names = {axis.group.group_name: axis.name for axis in axes if axis.group is not None}
        self._ranks = {
            axis.name: set(dist.get_process_group_ranks(axis.group)) for axis in axes if axis.group is not None
        }
        self.axes = {axis.name: Traffic() for axis in axes if axis.size > 1}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", None) == "c10d" and (kind := KINDS.get(func._opname)):
            leaves = tree_leaves((args, kwargs))
            group = group_in(leaves)
            name = None if group is None else self._name(group)
            if name in self.axes:
                traffic = self.axes[name]
                traffic.counts[kind] += 1
                traffic.bytes += max(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        return result

    def _name(self, group: dist.ProcessGroup) -> str | None:
        if (name := self._names.get(group.group_name)) is None:
            ranks = set(dist.get_process_group_ranks(group))
            name = next((name for name, of_axis in self._ranks.items() if ranks <= of_axis), None)
        return name


def group_in(arguments: list[Any]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments of one of c10d's operations."""
    for boxed in arguments:
        if isinstance(boxed, torch.ScriptObject) and boxed._type().name() == "ProcessGroup":  # type: ignore[attr-defined]
            return dist.ProcessGroup.unbox(boxed)
    return None
