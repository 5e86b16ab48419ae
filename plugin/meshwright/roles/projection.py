"""Linear projections in two forms: torch's ``nn.Linear``, and GPT-2's ``Conv1D``, whose weight is transposed.

A projection may be wrapped in adapters; these functions look at the projection itself.
"""

from __future__ import annotations

from torch import nn

from meshwright.roles.adapters import projection


def is_projection(module: nn.Module) -> bool:
    """Return whether a module is a linear projection, with or without a bias or adapters."""
    return isinstance(projection(module), nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a projection's weight is ``[in, out]`` (transformers' ``Conv1D``), not ``[out, in]``."""
    module = projection(module)
    weight = getattr(module, "weight", None)
    return type(module).__name__ == "Conv1D" and getattr(weight, "ndim", 0) == 2 and hasattr(module, "nf")


def out_features(module: nn.Module) -> int:
    return int(projection(module).weight.shape[1 if is_transposed(module) else 0])


def in_features(module: nn.Module) -> int:
    return int(projection(module).weight.shape[0 if is_transposed(module) else 1])
