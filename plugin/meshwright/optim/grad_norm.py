"""The global gradient norm and gradient clipping, under every plan."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import all_gather

# A gradient of this rank, and the number of ranks that hold each of its elements.
Counted = tuple[Tensor, "Tensor | float"]

_BLOCK = 256  # elements whose norm is computed in float32 on CPU
_LEAST_SQUARES = 1e-20  # in a sum of squares above this, the squares that float32 loses (below 1e-38) do not matter


def global_norm(gradients: Iterable[Counted], *, norm_type: float, axes: Iterable[Axis], like: Tensor) -> Tensor:
    """Return the norm of all gradients of the model, with each element counted once.

    Args:
        gradients: this rank's gradients, with the number of copies of each element.
        norm_type: p of the p-norm, or infinity.
        axes: the axes over which the gradients are spread.
        like: a tensor on the device to use, since this rank may have no gradient.
    """
    device = like.device
    if math.isinf(norm_type):
        peaks = [grad.abs().amax() for grad, _ in gradients if grad.numel()]
        own = torch.stack(peaks).amax().double() if peaks else torch.zeros((), dtype=torch.float64, device=device)
    else:
        own = _power_sum(list(gradients), norm_type, device)
    for axis in axes:
        ranks = all_gather(own.reshape(1), axis)
        own = ranks.amax() if math.isinf(norm_type) else ranks.sum()
    return own if math.isinf(norm_type) else own.pow(1.0 / norm_type)


def _power_sum(gradients: list[Counted], p: float, device: torch.device) -> Tensor:
    whole = [(grad, copies) for grad, copies in gradients if isinstance(copies, float)]
    mixed = [(grad, copies) for grad, copies in gradients if not isinstance(copies, float)]
    total = torch.zeros((), dtype=torch.float64, device=device)
    # Grouped by the number of copies, since a tensor of these numbers would have to be copied to the device in each
    # step.
    for shared in sorted({copies for _, copies in whole}):
        total = total + _sum_of_powers([grad for grad, own in whole if own == shared], p) / shared
    for grad, copies in mixed:
        total = total + (grad.abs().double().pow(p) / copies).sum()
    return total


def _sum_of_powers(gradients: list[Tensor], p: float) -> Tensor:
    """Return the sum of the p-th powers of all elements, in float64."""
    if p == 2.0 and all(grad.device.type == "cpu" for grad in gradients):
        squares = _sum_of_squares(gradients)
        if _LEAST_SQUARES < squares < math.inf:  # else float32 cannot represent the squares of these gradients
            return squares
    return torch.stack(torch._foreach_norm(gradients, p, dtype=torch.float64)).pow(p).sum()


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of the squares, which are added up in float32 within short blocks.

    In float32, torch's CPU kernel is off by up to 1e-3 on large tensors, and by a different amount per shard, so the
    norm would depend on the plan. Over a short block it is off by less than 1e-6, and the errors of many blocks cancel.
    The float64 kernel needs ten times as long, since it converts all elements first.
    """
    blocks = []
    for grad in gradients:
        wide = torch.promote_types(grad.dtype, torch.float32)
        flat = grad.reshape(-1)
        last = flat.numel() // _BLOCK * _BLOCK
        blocks.append(torch.linalg.vector_norm(flat[:last].view(-1, _BLOCK), dim=1, dtype=wide).double())
        blocks.append(torch.linalg.vector_norm(flat[last:].view(1, -1), dim=1, dtype=wide).double())
    return torch.cat(blocks).square().sum()


def scale_by_norm(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients in place as ``torch.nn.utils.clip_grad_norm_`` does."""
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in gradients:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for dtype, members in by_dtype.items():
        # A coefficient in half precision would be off by half a percent.
        torch._foreach_mul_(members, coefficient.to(torch.promote_types(dtype, torch.float32)))
