"""A static check of a plan: which tensors of a step are replicated, sharded or partial sums over the tp axis."""

from conformance.spmd.check import Finding, check_plan

__all__ = ["Finding", "check_plan"]
