"""float64 all the way, as ``meshwright verify`` compares."""

from meshwright.verification.float64_modules import Float64, relative_difference

__all__ = ["Float64", "relative_difference"]
