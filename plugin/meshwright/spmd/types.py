"""What a tensor is over the tp axis, and what an operation makes of it.

The types are those of spmd_types (https://pypi.org/project/spmd-types), a type system for SPMD programs: they say of
a value what its gradient is as well, so a forward pass is enough to know that backward is right.

==============  ================================  ==========================================================
type            the value on the ranks of tp      its gradient on the ranks of tp
==============  ================================  ==========================================================
``INVARIANT``   equal                             equal: nothing is left to reduce
``REPLICATED``  equal                             partial: somebody sums it over the axis
``VARYING``     each rank's own part              each rank's own part
``PARTIAL``     each rank's addend of a sum       equal
==============  ================================  ==========================================================

An operation between a tensor that is ``INVARIANT`` and one that is ``VARYING`` is the classic silent mistake: the
first one's gradient is one rank's part, and nobody sums it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a tensor is over the tp axis."""

    INVARIANT = "replicated, with a replicated gradient"
    REPLICATED = "replicated, with a gradient that is summed over tp"
    VARYING = "sharded"
    PARTIAL = "a partial sum"


@dataclass(frozen=True)
class Typed:
    """A tensor's type in one operation.

    Args:
        kind: over the tp axis.
        has_gradient: whether a gradient flows back to it; without one, INVARIANT and REPLICATED are the same.
        dim: of a VARYING parameter, the dim that is sharded; None for activations.
        is_wide: of a VARYING activation, whether its last dim is the sharded one (channels, words).
        name: of the parameter, for messages.
    """

    kind: Kind
    has_gradient: bool
    dim: int | None = None
    is_wide: bool = False
    name: str = ""

    @property
    def said(self) -> str:
        return f"{self.name or 'an activation'} ({self.kind.value})"


class TypeMismatch(Exception):
    """An operation whose result or gradient would be one rank's part, taken for the whole."""

    def __init__(self, message: str, result: Kind):
        super().__init__(message)
        self.result = result  # as what the check goes on with


def join(inputs: Sequence[Typed]) -> Kind | None:
    """The type of an operation that may be nonlinear, from those of its inputs; None without inputs.

    Raises:
        TypeMismatch: for a partial sum, and for inputs of which one's gradient would never be summed.
    """
    kinds = {x.kind for x in inputs}
    if Kind.PARTIAL in kinds:
        partial = next(x for x in inputs if x.kind is Kind.PARTIAL)
        raise TypeMismatch(f"uses {partial.said} before it is summed over tp", Kind.INVARIANT)
    invariant = next((x for x in inputs if x.kind is Kind.INVARIANT and x.has_gradient), None)
    for kind in (Kind.VARYING, Kind.REPLICATED):
        if kind in kinds:
            other = next((x for x in inputs if x.kind is kind and (x.has_gradient or kind is Kind.VARYING)), None)
            if invariant is not None and other is not None:
                raise TypeMismatch(
                    f"combines {invariant.said} with {other.said}: the gradient of the first is one rank's part, and "
                    "nothing sums it",
                    kind,
                )
            return kind if other is not None else Kind.INVARIANT
    return Kind.INVARIANT if kinds else None
