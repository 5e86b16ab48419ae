"""Linear projections in two forms: torch's ``nn.Linear``, and GPT-2's ``Conv1D``, whose weight is transposed.

A projection may be wrapped in adapters; these functions look at the projection itself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from meshwright.roles.adapters import projection


def is_projection(module: nn.Module) -> bool:
    """Return whether a module is a linear projection, with or without a bias or adapters."""
    return isinstance(projection(module), nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a projection's weight is ``[in, out]`` (transformers' ``Conv1D``), not ``[out, in]``."""
    module = projection(module)
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and weight_of(module).ndim == 2


def out_features(module: nn.Module) -> int:
    return int(weight_of(projection(module)).shape[1 if is_transposed(module) else 0])


def in_features(module: nn.Module) -> int:
    return int(weight_of(projection(module)).shape[0 if is_transposed(module) else 1])


def weight_of(module: nn.Module) -> Tensor:
    """Return a module's weight, or what a parametrization computes it from, which may change by being computed."""
    if not is_parametrized(module, "weight"):
        return module.weight  # type: ignore[return-value]
    parts: Any = module.parametrizations
    found: Tensor = parts.weight.original if hasattr(parts.weight, "original") else parts.weight.original0
    return found
