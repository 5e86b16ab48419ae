"""Keeps the program's hooks on a gradient from autograd, and gathers the whole gradient that they are called with.

The hooks stay where torch's own code finds them. A gradient of which each rank has a part is gathered on every rank.

``ProgramHooks`` has the place of torch's dict of hooks; autograd finds the runtime's hooks alone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.layout.row_layout import copy_blocks
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Axis, Mesh
from meshwright.parallel.collectives import all_reduce

Hook = Callable[[Tensor], Tensor | None]

_OWN = -1  # the key of the runtime's hook; torch counts its handles from 0


class HooksOfModel(Protocol):
    """What is told of the program's hooks."""

    def added(self, parameter: nn.Parameter) -> None:
        """Called before the program makes a hook; may raise."""

    def removed(self, parameter: nn.Parameter) -> None:
        """Called when the program has removed a hook."""


class ProgramHooks(dict[int, Any]):
    """Takes the place of torch's dict of a tensor's hooks, and keeps the program's hooks from autograd.

    Torch's Python code, which adds and removes the program's hooks, calls the methods below. Autograd reads the memory
    of the dict itself, where the runtime's hook is.

    Args:
        own: the runtime's hook.
        before: the hooks that the program has made before; their handles go on to refer to this dict.
        of: the model's hooks, which are told of new ones.
        parameter: the parameter.
    """

    def __init__(self, own: Hook, before: Mapping[int, Hook] | None, of: HooksOfModel, parameter: nn.Parameter):
        super().__init__()
        self._own, self._before, self._hooks = own, before or {}, dict[int, Hook]()
        self._of, self._parameter = weakref.ref(of), weakref.ref(parameter)

    def turn_on(self) -> None:
        """Let autograd call the runtime's hook from now on."""
        super().__setitem__(_OWN, self._own)

    def __setitem__(self, key: int, hook: Hook) -> None:
        of, parameter = self._of(), self._parameter()
        if of is None or parameter is None:  # the model is gone, and autograd runs the hooks
            super().__setitem__(key, hook)
        else:
            of.added(parameter)
        self._hooks[key] = hook

    def __delitem__(self, key: int) -> None:
        self.pop(key, None)
        del self._hooks[key]
        if (of := self._of()) is not None and (parameter := self._parameter()) is not None:
            of.removed(parameter)

    def __contains__(self, key: object) -> bool:
        return key in self._hooks

    def __getitem__(self, key: int) -> Hook:
        return self._hooks[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._hooks)

    def __len__(self) -> int:
        return len(self._before) + len(self._hooks)

    def values(self) -> Any:
        """Return the program's hooks, in the order in which they were made."""
        return (*self._before.values(), *self._hooks.values())

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Turn the runtime's hook off inside the context."""
        own = self.pop(_OWN, None)
        try:
            yield
        finally:
            if own is not None:
                super().__setitem__(_OWN, own)


def on_every_rank(part: Tensor, layout: TensorLayout, mesh: Mesh) -> Tensor:
    """Return the whole tensor in new memory on every rank; all ranks of the mesh must make the call.

    Each element comes from one rank and is added to zeros, so the sums are exact.

    Args:
        part: what this rank has of the tensor, 1-d; empty on a rank that has nothing of it.
        layout: which elements each rank has.
        mesh: the ranks.
    """
    is_of_stage = not layout.is_staged or mesh.pp.rank == layout.first_stage
    if is_of_stage and not layout.is_cut:
        whole = part.view(layout.shape).clone()
    else:
        whole = torch.zeros(layout.shape, dtype=part.dtype, device=part.device)
    if is_of_stage and layout.is_cut:
        axes = _axes(layout, mesh)
        _put_own(whole.view(-1), part.contiguous(), layout, mesh, is_over_tp=len(axes) == 1)
        for axis in axes:
            all_reduce(whole, axis)
    return all_reduce(whole, mesh.pp) if layout.is_staged else whole


def _axes(layout: TensorLayout, mesh: Mesh) -> list[Axis]:
    """Return the axes over which the ranks of one stage have different parts."""
    is_over_tp = not layout.is_sliced and all(rows.is_replicated or axis == "tp" for axis, rows in layout.cuts)
    return [mesh.tp] if is_over_tp else [mesh.tp, mesh.tokens]


def _put_own(whole: Tensor, part: Tensor, layout: TensorLayout, mesh: Mesh, *, is_over_tp: bool) -> None:
    """Copy into ``whole`` the elements that this rank is the first to have, of the ranks that sum them."""
    for shards, spans in layout.regions(mesh.places):
        for owner, *_ in shards[0]:
            is_own = mesh.places[owner]["tp"] == mesh.tp.rank if is_over_tp else owner == mesh.index
            if is_own:
                copy_blocks(whole, part, [block.swapped() for block in layout.blocks(None, spans)])
