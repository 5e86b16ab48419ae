"""A process group on which no rank waits for one that has failed."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup, ReduceOp
from torch.utils._pytree import tree_leaves

from meshwright.faults.interpose import COLLECTIVES, own_collectives
from meshwright.mesh.process_group import wire_device


class Stopped(Exception):
    """Another rank has failed, or the ranks were about to call different collectives."""


class WatchedGroup:
    """Stands in place of a process group, whose ranks agree before each collective that all of them are well.

    Args:
        group: the process group.
    """

    def __init__(self, group: ProcessGroup):
        self._group, self._device = group, wire_device(group=group)
        self._is_stopped = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        if name not in COLLECTIVES:
            return method

        def call(*args: Any) -> Any:
            shapes = [(tuple(x.shape), x.dtype) for x in tree_leaves(args) if isinstance(x, Tensor)]
            if not self.agree(f"{name} {shapes}"):
                raise Stopped("another rank of tp failed")
            return method(*args)

        return call

    @own_collectives()
    def agree(self, what: str, *, is_well: bool = True) -> bool:
        """Return on every rank whether all are well and about to do the same.

        Args:
            what: what this rank is about to do.
            is_well: whether nothing has failed on this rank.
        """
        if self._is_stopped:
            return False
        number = zlib.crc32(what.encode())
        said = torch.tensor([int(not is_well), number, -number], device=self._device)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX  # type: ignore[assignment]  # as torch.distributed does
        self._group.allreduce([said], options).wait()
        failed, most, least = said.tolist()
        self._is_stopped = bool(failed) or most != -least
        return not self._is_stopped
