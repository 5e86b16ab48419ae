"""Linear projections in both of their forms: torch's, and GPT-2's ``Conv1D`` with its weight transposed.

Each may have adapters around it; what is asked here is asked of the projection itself.
"""

from __future__ import annotations

from torch import nn

from meshwright.roles.adapters import projection


def is_projection(module: nn.Module) -> bool:
    """Whether a module is a matrix product, with a bias or without, and with adapters or without."""
    return isinstance(projection(module), nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a projection's weight is ``[in, out]`` (transformers' ``Conv1D``), not ``[out, in]``."""
    module = projection(module)
    weight = getattr(module, "weight", None)
    return type(module).__name__ == "Conv1D" and getattr(weight, "ndim", 0) == 2 and hasattr(module, "nf")


def out_features(module: nn.Module) -> int:
    return int(projection(module).weight.shape[1 if is_transposed(module) else 0])


def in_features(module: nn.Module) -> int:
    return int(projection(module).weight.shape[0 if is_transposed(module) else 1])
