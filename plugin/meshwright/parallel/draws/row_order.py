"""Follows through a pass which dim of each tensor has the rows of the batch, one after the other.

A dim of ``[rows * tokens, hidden]`` may have the tokens of a row next to each other, or the rows of a token. The shape
does not show which. A reshape keeps the order of all elements, so the order is known if all that leads from the inputs
to the tensor keeps it. What is not known to keep it ends it, so a wrong order is never found.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Operations that compute each entry of the first dim from the same entry of their argument at this place.
_KEEP_FIRST = {
    "mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "linear": 0, "embedding": 1, "native_layer_norm": 0, "convolution": 0,
    "_fused_rms_norm": 0, "native_group_norm": 0, "_scaled_dot_product_flash_attention_for_cpu": 0,
    "_scaled_dot_product_flash_attention": 0, "_scaled_dot_product_efficient_attention": 0,
}  # fmt: skip
# Those that compute along the dims that their second argument names.
_ALONG = {
    "_softmax", "_log_softmax", "max", "min", "sum", "mean", "argmax", "amax", "gather", "scatter", "scatter_",
    "cumsum", "logsumexp",
}  # fmt: skip
_COPIES = {"clone", "_to_copy", "detach", "alias", "lift_fresh", "native_dropout", "expand"}
_FILLS = {"fill_", "zero_", "masked_fill_", "new_zeros", "new_ones", "new_full", "new_empty"}
_DRAWS = torch.Tag.nondeterministic_seeded
_VIEWS = {"view", "_unsafe_view", "reshape"}


class RowOrder:
    """Knows the dims of the rows.

    Args:
        inputs: tensors whose first dim has the rows.
        rows: the number of the rows.
    """

    def __init__(self, inputs: Iterable[Tensor], rows: int):
        self._rows = rows
        self._dims: dict[Hashable, int | None] = {}
        self._kept: list[Tensor] = []  # so that no other tensor has the same memory
        for x in inputs:
            self._keep(x, 0)

    def of(self, x: Tensor) -> int | None:
        """Return the dim of a tensor that has the rows one after the other; None if it is not known."""
        return self._dims.get(_key(x))

    def _keep(self, x: Tensor, dim: int | None) -> None:
        if dim is not None or _key(x) in self._dims:
            self._dims[_key(x)] = dim
            self._kept.append(x)

    def follow(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Follow an operation.

        Args:
            func: the operation.
            args: its arguments.
            result: what it returned.
        """
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._keep(x, self._dim(func, args, x))

    def _dim(self, func: Any, args: tuple[Any, ...], result: Tensor) -> int | None:
        name = func.overloadpacket.__name__
        x = args[_KEEP_FIRST.get(name, 0)] if len(args) > _KEEP_FIRST.get(name, 0) else None
        if torch.Tag.pointwise in func.tags:
            return self._of_pointwise(args, result)
        if not isinstance(x, Tensor) or (dim := self.of(x)) is None:
            return None
        is_same = result.ndim > dim and result.shape[dim] == x.shape[dim]
        if name in _VIEWS:
            is_kept = result.shape[:dim] == x.shape[:dim]
            is_whole = is_kept and result.ndim > dim and result.shape[dim] > 0 and result.shape[dim] % self._rows == 0
            return dim if is_whole else None
        if name in ("transpose", "t", "permute"):
            order = list(range(x.ndim))
            if name == "permute":
                order = [i % x.ndim for i in args[1]]
            else:
                one, other = (0, 1) if name == "t" else (args[1] % x.ndim, args[2] % x.ndim)
                order[one], order[other] = other, one
            return order.index(dim)
        if name == "unsqueeze":
            return dim + int(args[1] % (x.ndim + 1) <= dim)
        if name in _ALONG and len(args) > 1:
            along = args[1] if isinstance(args[1], list | tuple) else [args[1]]
            is_same &= all(type(i) is int and i % x.ndim > dim for i in along)
        elif name in ("index_put", "index_put_"):
            is_same &= args[2].ndim <= 1 < result.ndim - dim  # one value for all rows
        elif name == "slice":
            is_same &= len(args) > 1 and args[1] % x.ndim != dim
        elif name in _COPIES or name in _FILLS or name.endswith("_like") or _DRAWS in func.tags:
            is_same &= result.ndim == x.ndim
        else:
            is_same &= name in _KEEP_FIRST and dim == 0
        return dim if is_same else None

    def _of_pointwise(self, args: tuple[Any, ...], result: Tensor) -> int | None:
        found = set()
        for x in args:
            if isinstance(x, Tensor) and (dim := self.of(x)) is not None:
                place = result.ndim - x.ndim + dim
                if result.shape[place] == x.shape[dim]:
                    found.add(place)
        return found.pop() if len(found) == 1 else None


def _key(x: Tensor) -> Hashable:
    """Return what is equal for two tensors of the same elements. Autograd makes a new object of each view."""
    if x.layout is not torch.strided:
        return id(x)
    return x.untyped_storage()._cdata, x.shape, x.stride(), x.storage_offset()
