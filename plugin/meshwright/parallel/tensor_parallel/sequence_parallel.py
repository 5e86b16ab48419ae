"""Sequence parallelism: between blocks, each rank of the TP axis holds a share of the tokens.

Outside attention a decoder processes each token independently, so ranks may share them in any way. Each rank
has a contiguous run of the flattened batch. Collectives then need no transposition, and the local shape,
``[batch, sequence / tp, hidden]``, still determines the full shape. If the sequence length is not divisible
by tp, zero rows pad the end of the flattened batch, and every gather removes them.

Shape suffixes: B batch, S sequence, L local sequence (padded S / tp), H hidden; of several streams of hidden states,
streams x hidden.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.errors import PlanError
from meshwright.mesh.axes import Axis
from meshwright.parallel import saved_tensors as saved
from meshwright.parallel.collectives import Operation, gather_rows, reduce_scatter_rows, split_rows, unsplit_rows
from meshwright.parallel.dropout_streams import DropoutStreams, Restore


class SequenceSharding:
    """Converts activations between all tokens and this rank's tokens."""

    def __init__(self, axis: Axis):
        self.axis = axis
        # The true sequence length of the last forward pass, which recomputation in backward reads too. It
        # matters only for lengths that are not divisible by tp.
        self._length = 0
        self._beside: list[tuple[weakref.ref[Tensor], int, tuple[int, int]]] = []

    def set_length(self, length: int) -> None:
        """Set the length of the whole sequence, for a rank that receives its tokens from another pipeline stage."""
        self._length = length

    def is_whole(self, x: Tensor) -> bool:
        """Return whether an activation of the last forward pass has all tokens, not this rank's tokens."""
        return x.shape[1] == self._length

    def is_local(self, length: int) -> bool:
        """Return whether an activation of this length has this rank's tokens of the last forward pass."""
        return length == self._local_length(self._length)

    def keep_whole(self, given: Iterable[Tensor]) -> None:
        """Remember what every rank has whole inside of the layers, whatever its length, such as an encoder's result."""
        self._beside = [known for known in self._beside if known[0]() is not None]
        for x in given:  # a layer may be given a view that ends with it
            owner = x if x._base is None else x._base
            self._beside.append((weakref.ref(owner), x.numel(), saved.memory(x)))

    def is_kept_whole(self, x: Tensor) -> bool:
        """Return whether a tensor is one of those of :meth:`keep_whole`, or all of it under another shape."""
        own = x.numel(), saved.memory(x)
        return any(owner() is not None and own == (numel, memory) for owner, numel, memory in self._beside)

    def split(self, x_BSH: Tensor) -> Tensor:
        """Return this rank's tokens of a replicated activation, ``[B, L, H]``."""
        self._length = x_BSH.shape[1]
        return self._shape_local(split_rows(self._flatten(x_BSH), self.axis), x_BSH)

    def gather(self, x_BLH: Tensor, gather: Operation = gather_rows) -> Tensor:
        """Return all tokens, ``[B, S, H]``, for sharded projections (backward: reduce-scatter).

        If the layer has flattened its tokens to rows, return all rows, including padding.
        """
        if x_BLH.ndim == 2:
            return gather(x_BLH, self.axis)
        return self._shape_full(gather(x_BLH.flatten(0, 1), self.axis), x_BLH)

    def unsplit(self, x_BLH: Tensor) -> Tensor:
        """Return all tokens, ``[B, S, H]``, for replicated consumers (backward: keep this rank's tokens)."""
        return self._shape_full(unsplit_rows(x_BLH.flatten(0, 1), self.axis), x_BLH)

    def reduce_scatter(self, x_BSH: Tensor) -> Tensor:
        """Sum over ranks and return this rank's tokens, ``[B, L, H]``; rows stay rows (backward: all-gather)."""
        if x_BSH.ndim == 2:
            return reduce_scatter_rows(x_BSH, self.axis)
        return self._shape_local(reduce_scatter_rows(self._flatten(x_BSH), self.axis), x_BSH)

    def _local_length(self, length: int) -> int:
        return -(-length // self.axis.size)

    def _flatten(self, x_BSH: Tensor) -> Tensor:
        batch, length = x_BSH.shape[:2]
        rows = x_BSH.flatten(0, 1)
        padding = batch * (self._local_length(length) * self.axis.size - length)
        return F.pad(rows, (*(0, 0) * (rows.ndim - 1), 0, padding)) if padding else rows

    def _shape_local(self, rows: Tensor, like_BSH: Tensor) -> Tensor:
        return rows.view(like_BSH.shape[0], self._local_length(like_BSH.shape[1]), *rows.shape[1:])

    def _shape_full(self, rows: Tensor, like_BLH: Tensor) -> Tensor:
        batch, local_length = like_BLH.shape[:2]
        length = local_length * self.axis.size
        if self._local_length(self._length) == local_length:
            length = self._length
        if rows.shape[0] != batch * length:
            rows = rows[: batch * length]  # without the padding
        return rows.view(batch, length, *rows.shape[1:])


class AllTokens:
    """Hooks that give a module of a layer all tokens, and keep this rank's tokens of its result.

    The module may mix tokens. Every rank computes the same, so the module's weights get whole gradients on each.

    Args:
        name: the module's name, for messages.
        module: the module.
        sequence: how the ranks share the tokens.
        streams: the model's dropout streams.
        is_open: for a module that may run outside of the region too, whether a call is inside of it; the module then
            gets what is not this rank's tokens as it is.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        sequence: SequenceSharding,
        streams: DropoutStreams,
        is_open: Callable[[], bool] | None = None,
    ):
        self.name, self.sequence, self.streams, self.is_open = name, sequence, streams, is_open
        self._restore: Restore | None = None
        self._ndims = {3}  # of hidden states
        module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_open is not None and not self.is_open():
            return None
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        given = [x for x in given if not self.sequence.is_kept_whole(x)]
        floats = [x for x in given if x.is_floating_point()]
        hidden = next((x for x in floats if x.ndim == 3 or (len(floats) == 1 and x.ndim > 3)), None)
        is_local = hidden is not None and self.sequence.is_local(hidden.shape[1])
        own = [x for x in given if hidden is not None and x.shape[:2] == hidden.shape[:2]]
        is_known = all(x.ndim >= 3 and x.is_floating_point() for x in own)
        if not is_local and self.is_open is not None:
            return None
        if hidden is None or not is_local or not (is_known or hidden.shape[1] == 1):
            shapes = ", ".join(str(tuple(x.shape)) for x in given)
            raise PlanError(
                f"{self.name} ({type(module).__name__}) stays whole under tp, and is given tensors of the shapes "
                f"{shapes}. It is not known which of them have the hidden states of this rank's tokens. Use tp "
                "without sequence parallelism: ParallelPlan(tp=2), or in words plan='tp2'"
            )
        self._ndims = {3, hidden.ndim}
        whole = {id(x): self.sequence.unsplit(x) for x in own if x.ndim in self._ndims}
        self._restore = self.streams.enter_shared(own[0])
        return tree_map_only(Tensor, lambda x: whole.get(id(x), x), (args, kwargs))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._restore is None:
            return None
        self._restore()
        self._restore = None
        return tree_map_only(Tensor, self._own, output)

    def _own(self, x: Tensor) -> Tensor:
        is_whole = x.ndim in self._ndims and x.is_floating_point() and self.sequence.is_whole(x)
        return self.sequence.split(x) if is_whole else x
