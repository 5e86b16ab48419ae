"""Save only this rank's rows of a block's gathered input, and gather the input again in backward.

All projections of a block save the block's input for their weight gradients. Under sequence parallelism
this input is the whole sequence, and keeping it would cost most of the memory that sharding the activations
saves. As in Megatron (Korthikanti et al. 2022, section 4.2.2), backward does one more all-gather instead.

A pass through a block uses column_projections.py if ``ColumnProjections.can_enter``, and this module otherwise: for a
compiled block, a projection with an adapter or another forward, a part of a layer that is no module of its own, and an
input that requires no gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwright.mesh.axes import Axis
from meshwright.parallel import saved_tensors as saved
from meshwright.parallel.collectives import all_gather
from meshwright.parallel.tensor_parallel.column_projections import LinearForward
from meshwright.roles.linear_kernel import kernel_of


class GatheredInput:
    """The input of one block in one forward pass: gathered in forward, saved as this rank's rows."""

    def __init__(self, full: Tensor, local: Tensor, axis: Axis):
        self._local = local.detach().flatten(0, -2)
        self._axis = axis
        self._memory = saved.memory(full)
        self._numel = full.numel()
        self._packed = self._unpacked = 0
        self._full: Tensor | None = None

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is the gathered input, in any shape."""
        is_whole = tensor.numel() == self._numel and tensor.is_contiguous()
        return is_whole and saved.memory(tensor) == self._memory

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._packed += 1
        shape = tensor.shape
        return lambda: self._unpack(shape)

    def _unpack(self, shape: torch.Size) -> Tensor:
        if self._full is None:
            self._full = all_gather(self._local, self._axis)
        full = self._full
        self._unpacked += 1
        if self._unpacked == self._packed:  # the block's last projection has used it, so free it
            self._full, self._unpacked = None, 0
        return full.flatten()[: self._numel].view(shape)


class RegatheredProjections:
    """Hooks on a block's projections that swap the saved input for a :class:`GatheredInput`.

    The block's own pre-hook calls :meth:`open` with the gathered input; :meth:`close` ends the pass.
    """

    def __init__(self, projections: list[nn.Module]):
        self._current: GatheredInput | None = None
        self._is_pushed = self._spans_block = False
        self._projections = projections
        inner = {id(module): module for projection in projections for module in projection.modules()}.values()
        # Another kernel's own forward may save a copy of its input, which is not recognised here.
        self._forwards = [LinearForward(m) for m in inner if (kernel := kernel_of(m)) and not kernel.is_differentiable]
        self._handles: list[RemovableHandle] = []

    def span_block(self) -> None:
        """Swap what the whole block saves, from :meth:`open` to :meth:`close`, without hooks on the projections.

        A compiled block saves its input once, for all projections.
        """
        self._spans_block = True
        for handle in self._handles:
            handle.remove()
        for forward in self._forwards:
            forward.remove()
        self._projections = []

    def open(self, full: Tensor, local: Tensor, axis: Axis) -> None:
        if torch.is_grad_enabled() and not saved.is_checkpointing():  # checkpointing drops the gathered input anyway
            self._hook()
            self._current = GatheredInput(full, local, axis)
            if self._spans_block:
                self._swap(self._current)

    def _hook(self) -> None:
        """Add the hooks at the first use, since most blocks never need them (see column_projections.py)."""
        for projection in self._projections:
            self._handles.append(projection.register_forward_pre_hook(self._push))
            self._handles.append(projection.register_forward_hook(self._pop, always_call=True))
        self._projections = []

    def close(self) -> None:
        if self._spans_block:
            self._pop()
        self._current = None

    def _push(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        gathered = self._current
        # The program's own checkpoint keeps the gathered input, and runs the projection again without its block.
        if gathered is not None and gathered.holds(args[0]) and not saved.is_checkpointing():
            self._swap(gathered)

    def _swap(self, gathered: GatheredInput) -> None:
        saved.push(lambda tensor: gathered.pack(tensor) if gathered.holds(tensor) else None)
        self._is_pushed = True

    def _pop(self, *_: object) -> None:
        if self._is_pushed:
            self._is_pushed = False
            saved.pop()
