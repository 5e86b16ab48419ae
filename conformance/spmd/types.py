"""The types of tensors over the tp axis, and the type of an operation's result.

The types are those of spmd_types (https://pypi.org/project/spmd-types), a type system for SPMD programs. They describe
a value's gradient as well, so a forward pass is enough to check backward too.

==============  ================================  ==========================================================
type            the value on the ranks of tp      its gradient on the ranks of tp
==============  ================================  ==========================================================
``INVARIANT``   equal                             equal: nothing is left to reduce
``REPLICATED``  equal                             partial: it is summed over the axis
``VARYING``     each rank's own part              each rank's own part
``PARTIAL``     each rank's addend of a sum       equal
==============  ================================  ==========================================================

An operation between an ``INVARIANT`` and a ``VARYING`` tensor is the classic silent mistake: the gradient of the
``INVARIANT`` tensor is one rank's part, and nothing sums the parts.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """The type of a tensor over the tp axis."""

    INVARIANT = "replicated, with a replicated gradient"
    REPLICATED = "replicated, with a gradient that is summed over tp"
    VARYING = "sharded"
    PARTIAL = "a partial sum"


@dataclass(frozen=True)
class Typed:
    """A tensor's type in one operation.

    Args:
        kind: the type over the tp axis.
        has_gradient: whether a gradient flows back to the tensor; if not, INVARIANT and REPLICATED are the same.
        dim: the sharded dim of a VARYING parameter; None for activations.
        is_wide: whether a VARYING activation is sharded over its last dim (channels, words).
        name: the parameter's name, for messages.
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
    """An operation whose result or gradient would be one rank's part, treated as the whole."""

    def __init__(self, message: str, result: Kind):
        super().__init__(message)
        self.result = result  # the type with which the check continues


def join(inputs: Sequence[Typed]) -> Kind | None:
    """Return the type of the result of an operation that may be nonlinear; None if there are no inputs.

    Raises:
        TypeMismatch: if an input is a partial sum, or an input's gradient would never be summed.
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
