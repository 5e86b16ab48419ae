"""float64 all the way, as ``meshwright verify`` compares."""

from meshwright.verification.exact import Float64, relative_difference

__all__ = ["Float64", "relative_difference"]
