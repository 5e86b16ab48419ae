"""The global gradient norm of distributed models, under every plan, and ``clip_grad_norm_``, which clips by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.mesh.axes import Axis
from meshwright.optim.runtime import Watch, find_runtime
from meshwright.parallel.collectives import all_gather

# A gradient of this rank, and the number of ranks that hold each of its elements.
Counted = tuple[Tensor, "Tensor | float"]

_BLOCK = 256  # elements whose norm is computed in float32 on CPU
_LEAST_SQUARES = 1e-20  # in a sum of squares above this, the squares that float32 loses (below 1e-38) do not matter


def clip_grad_norm_(
    model: nn.Module | Optimizer, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the gradients of a model by their global norm, as one device would.

    Every rank must make the call.

    Args:
        model: the model that ``to_distributed`` returned, or an optimizer from ``shard_optimizer``; any other
            model is clipped by torch.
        max_norm: maximum norm of the gradients after clipping.
        norm_type: p of the p-norm; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: whether to raise if the norm is NaN or infinite; otherwise such a norm scales the
            gradients, as in torch.

    Returns:
        The norm before clipping, the same on every rank.

    Raises:
        TypeError: if ``model`` is neither, such as ``model.parameters()``, or ``max_norm`` is not a number.
        ValueError: if the gradients were never synchronised (see ``no_sync``).
        RuntimeError: if the norm is not finite and ``error_if_nonfinite`` is set.

    Example::

        loss.backward()
        norm = mw.clip_grad_norm_(model, 1.0)
        optimizer.step()
    """
    if not isinstance(model, nn.Module | Optimizer):
        raise TypeError(
            f"clip_grad_norm_ takes the model, not a {type(model).__name__}: the norm needs the gradients of all "
            "ranks; write mw.clip_grad_norm_(model, max_norm), not model.parameters()"
        )
    if max_norm is None or isinstance(max_norm, str):
        raise TypeError(
            f"max_norm={max_norm!r} is not a number; write mw.clip_grad_norm_(model, 1.0), or math.inf in place of 1.0 "
            "to compute the norm alone"
        )
    runtime = find_runtime(model)
    if runtime is None:
        parameters = (
            model.parameters()
            if isinstance(model, nn.Module)
            else [p for group in model.param_groups for p in group["params"]]
        )
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    runtime.check_own("clip_grad_norm_", "set gradient_clipping in its configuration")
    runtime.gradients.check_synced()
    runtime.meet_all("clip_grad_norm_")
    gradients = runtime.gradients.counted(runtime.mesh)
    like = runtime.gradients.parameters[0] if runtime.gradients.parameters else torch.zeros(())
    norm = global_norm(gradients, norm_type=float(norm_type), axes=tuple(runtime.mesh.factors.values()), like=like)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the global gradient norm of order {norm_type} is {norm.item()}, so the gradients cannot be clipped by it"
        )
    scale_by_norm([grad for grad, _ in gradients], norm, float(max_norm))
    norm = norm if like.dtype is torch.float64 else norm.float()
    if (watch := runtime.features.find(Watch)) is not None:
        watch.saw_norm(norm)
    return norm


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
