"""float64 all the way, as ``meshwright verify`` compares."""

from torch import Tensor

from meshwright_tools.verification.float64_modules import Float64

__all__ = ["Float64", "gradient_differences", "relative_difference"]


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the expected tensor's largest value."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    scale = expected.abs().max().item() or 1.0
    return (actual.to(expected.dtype) - expected).abs().max().item() / scale


def gradient_differences(
    actual: dict[str, Tensor], expected: dict[str, Tensor], *, rounding: float = 1e-12
) -> dict[str, float]:
    """Return the difference of each gradient, relative to its largest value.

    A gradient that is zero except for rounding (a key's bias), at most ``rounding`` times the largest gradient, is
    compared with the largest gradient.
    """
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    sizes = {name: x.abs().max().item() for name, x in expected.items()}
    largest = max(sizes.values())
    return {
        name: (actual[name].to(x.dtype) - x).abs().max().item()
        / (sizes[name] if sizes[name] > rounding * largest else largest)
        for name, x in expected.items()
    }
