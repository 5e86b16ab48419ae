"""Linear layers whose weights' gradients the runtime computes itself, apart from the gradients of their inputs."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.roles.projection import is_transposed


def is_stock_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer (or transformers' Conv1D) with its class's own forward."""
    return type(module).forward is nn.Linear.forward or is_transposed(module)


def weight_gradient(x: Tensor, gradient: Tensor, transposed: bool) -> Tensor:
    """Return the gradient of a linear weight.

    Args:
        x: the layer's input, ``[..., in]``.
        gradient: the gradient of the layer's output, ``[..., out]``.
        transposed: whether the weight is ``[in, out]``.
    """
    left, right = weight_factors(x, gradient, transposed)
    return left.t() @ right


def weight_factors(x: Tensor, gradient: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return ``left, right`` such that ``left.T @ right`` is :func:`weight_gradient`."""
    rows = x if x.ndim == 2 else x.flatten(0, -2)
    gradients = gradient if gradient.ndim == 2 else gradient.flatten(0, -2)
    return (rows, gradients) if transposed else (gradients, rows)
