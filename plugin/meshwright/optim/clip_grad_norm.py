"""``clip_grad_norm_`` for distributed models."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.optim.grad_norm import global_norm, scale_by_norm
from meshwright.optim.runtime import Watch, find_runtime


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
