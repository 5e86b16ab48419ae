"""float64 all the way, as ``meshwright verify`` compares."""

from torch import Tensor

from meshwright.verification.float64_modules import Float64

__all__ = ["Float64", "relative_difference"]


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the expected tensor's largest value."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    scale = expected.abs().max().item() or 1.0
    return (actual.to(expected.dtype) - expected).abs().max().item() / scale
