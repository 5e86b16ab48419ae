"""The state of optimizers in the planner: its bytes, who holds it, and the work of a step beyond memory traffic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import PlanError

_BLOCK = 256  # elements that share a scale in 8-bit states (bitsandbytes, torchao); 128 in 4-bit states
_LEAST = 4096  # elements of the smallest parameter whose state is quantised
_ITERATIONS = 5  # Newton-Schulz iterations of Muon
_COLUMNS = 16  # a tensor of a layer with fewer times its width elements is a norm or a bias, and no matrix


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """What an optimizer keeps of each parameter.

    Args:
        name: the name in ``--optimizer``.
        tensors: tensors of the parameter's size, in the dtype that is stepped.
        packed: bytes per element of quantised tensors, of a parameter that is large enough.
        of_others: tensors for what is not a matrix of a layer.
        is_factored: whether a matrix has the sums of its rows and columns alone.
        is_whole: whether a step reads whole parameters, so that each has one owner.
        orthogonalises: whether a step multiplies matrices.
        words: what it is.
    """

    name: str
    tensors: int
    packed: float = 0.0
    of_others: int | None = None
    is_factored: bool = False
    is_whole: bool = False
    orthogonalises: bool = False
    words: str

    def state(self, numel: float, *, unit: int, is_matrix: bool) -> float:
        """Return the bytes of the state of one parameter.

        Args:
            numel: its elements.
            unit: bytes per element of what is stepped.
            is_matrix: whether it is a matrix of a layer.

        Example:
            >>> optimizer_kind("muon").state(100, unit=4, is_matrix=True)
            400
        """
        if self.packed:
            return numel * (self.packed if numel >= _LEAST else self.tensors * 4)
        if self.is_factored:
            return 8 * math.sqrt(numel) if is_matrix else 4 * numel
        return numel * unit * (self.tensors if is_matrix or self.of_others is None else self.of_others)

    def steps_whole(self, *, is_matrix: bool) -> bool:
        """Whether a parameter has an owner, who steps all of it; Muon's other parameters are AdamW's."""
        return self.is_whole and (is_matrix or self.of_others is None)

    def per_element(self, unit: int) -> float:
        """Return the bytes of state per element of a large matrix."""
        return self.state(2.0**24, unit=unit, is_matrix=True) / 2**24


OPTIMIZERS: Mapping[str, OptimizerKind] = {
    kind.name: kind
    for kind in (
        OptimizerKind(name="adamw", tensors=2, words="Adam, AdamW and others of two moments"),
        OptimizerKind(
            name="adamw8bit", tensors=2, packed=2 * (1 + 4 / _BLOCK), is_whole=True,
            words="AdamW with 8-bit moments (bitsandbytes, torchao)",
        ),
        OptimizerKind(
            name="adamw4bit", tensors=2, packed=2 * (0.5 + 4 / (_BLOCK // 2)), is_whole=True,
            words="AdamW with 4-bit moments (torchao)",
        ),
        OptimizerKind(name="ademamix", tensors=3, words="AdEMAMix"),
        OptimizerKind(name="schedule-free", tensors=2, words="schedule-free AdamW"),
        OptimizerKind(name="lion", tensors=1, words="Lion"),
        OptimizerKind(
            name="lion8bit", tensors=1, packed=1 + 4 / _BLOCK, is_whole=True, words="Lion with an 8-bit moment"
        ),
        OptimizerKind(
            name="muon", tensors=1, of_others=2, is_whole=True, orthogonalises=True,
            words="Muon for the matrices of layers, AdamW for the rest",
        ),
        OptimizerKind(
            name="adafactor", tensors=0, is_factored=True, is_whole=True, words="Adafactor without a first moment"
        ),
        OptimizerKind(name="sgd", tensors=0, words="SGD without momentum"),
        OptimizerKind(name="sgd-momentum", tensors=1, words="SGD with momentum"),
    )
}  # fmt: skip


def optimizer_kind(name: str | OptimizerKind) -> OptimizerKind:
    """Return an optimizer by its name, or itself.

    Raises:
        PlanError: the name is unknown.
    """
    if isinstance(name, OptimizerKind):
        return name
    if name not in OPTIMIZERS:
        raise PlanError(f"--optimizer {name!r} is unknown; write one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def is_matrix(numel: float, hidden: int) -> bool:
    """Return whether a tensor of a layer is a matrix, and not a norm or a bias."""
    return numel >= _COLUMNS * hidden


def orthogonalised(inner: float, outer: float) -> float:
    """Return the floating-point operations of Muon's update of a matrix.

    Example:
        >>> orthogonalised(64, 128) / (6 * 64 * 64 * 128)
        4.166666666666667
    """
    small, large = min(inner, outer), max(inner, outer)
    return _ITERATIONS * (4 * small * small * large + 2 * small**3)
