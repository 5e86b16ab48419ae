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
    rows, gradients = flat_rows(x, gradient)
    return rows.t() @ gradients if transposed else gradients.t() @ rows


def flat_rows(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return a linear layer's input and the gradient of its output, with one row for each token."""
    return x if x.ndim == 2 else x.flatten(0, -2), gradient if gradient.ndim == 2 else gradient.flatten(0, -2)
