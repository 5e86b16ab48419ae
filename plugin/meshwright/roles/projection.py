"""Linear projections and their sizes. A projection may be wrapped in adapters; these functions look inside."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from meshwright.layout.packed_weights import matrix_shape
from meshwright.roles.adapters import projection
from meshwright.roles.linear_kernel import form_of


def is_projection(module: nn.Module) -> bool:
    """Return whether a module is a linear projection, with or without a bias or adapters."""
    module = projection(module)
    return isinstance(module, nn.Linear) or form_of(module) is not None


def output_dim(module: nn.Module) -> int:
    """Return the dim of a module's weight that is its output."""
    kernel = form_of(projection(module))
    return 0 if kernel is None else kernel.output_dim


def out_features(module: nn.Module) -> int:
    return matrix_shape(weight_of(projection(module)))[output_dim(module)]


def in_features(module: nn.Module) -> int:
    return matrix_shape(weight_of(projection(module)))[1 - output_dim(module)]


def weight_of(module: nn.Module) -> Tensor:
    """Return a module's weight, or what a parametrization computes it from, which may change by being computed."""
    if not is_parametrized(module, "weight"):
        return module.weight  # type: ignore[return-value]
    computed = module.get_submodule("parametrizations.weight")
    return computed.original if hasattr(computed, "original") else computed.original0  # type: ignore[return-value]
