"""The operations that models apply to logits between the head and the loss: scaling, capping and casting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor


class LogitStep(Protocol):
    """An elementwise operation on logits, which may overwrite its input. Only a Cast changes the dtype."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the result, and a tensor that backward needs."""

    def backward(self, grad: Tensor, saved: Tensor | None) -> Tensor:
        """Return the gradient of the input, given that of the result; ``grad`` may be overwritten."""

    def plain(self, x: Tensor) -> Tensor:
        """Return the differentiable result, and leave the input unchanged, since something else may read it."""


@dataclass(frozen=True)
class Scale:
    """Multiplication by a number, or division by it, which is rounded differently."""

    number: float
    divides: bool = False

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return (x.div_(self.number) if self.divides else x.mul_(self.number)), None

    def backward(self, grad: Tensor, saved: Tensor | None) -> Tensor:
        return self.forward(grad)[0]

    def plain(self, x: Tensor) -> Tensor:
        return x / self.number if self.divides else x * self.number


@dataclass(frozen=True)
class Tanh:
    """The hyperbolic tangent, which caps logits."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh_(), x.clone()

    def backward(self, grad: Tensor, saved: Tensor | None) -> Tensor:
        assert saved is not None
        result: Tensor = torch.ops.aten.tanh_backward.grad_input(grad, saved, grad_input=grad)
        return result

    def plain(self, x: Tensor) -> Tensor:
        return x.tanh()


@dataclass(frozen=True)
class Cast:
    """A cast from one floating-point dtype to another."""

    source: torch.dtype
    target: torch.dtype

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x.to(self.target), None

    def backward(self, grad: Tensor, saved: Tensor | None) -> Tensor:
        return grad.to(self.source)

    def plain(self, x: Tensor) -> Tensor:
        return x.to(self.target)


def widest(steps: Sequence[LogitStep], dtype: torch.dtype) -> int:
    """Return the most bytes that an element of logits of a dtype has in these steps: a model may cast its logits."""
    return max((dtype.itemsize, *(step.target.itemsize for step in steps if isinstance(step, Cast))))


def step_of(
    func: Callable[..., object], args: Sequence[object], kwargs: dict[str, object], dtype: torch.dtype
) -> LogitStep | None:
    """Return the step that a torch function on logits of a dtype is, or None for any other function.

    Args:
        func: the function; its first argument is the logits.
        args: its positional arguments.
        kwargs: its keyword arguments.
        dtype: the dtype of the logits.
    """
    rest = args[1:]
    if func in _TANH and not rest and not kwargs:
        return Tanh()
    if (func in _MUL or func in _DIV) and len(rest) == 1 and not kwargs and _is_number(rest[0]):
        return Scale(rest[0], divides=func in _DIV)
    if func in _FLOAT and not rest and not kwargs:
        return Cast(dtype, torch.float32)
    if func is Tensor.to:
        given = [*rest, *kwargs.values()]
        if len(given) == 1 and set(kwargs) <= {"dtype"} and isinstance(given[0], torch.dtype):
            return Cast(dtype, given[0]) if given[0].is_floating_point else None
    return None


def run(steps: Sequence[LogitStep], x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Apply steps to logits, which are overwritten; return the result and what backward needs."""
    kept = []
    for step in steps:
        x, saved = step.forward(x)
        kept.append(saved)
    return x, kept


def run_backward(steps: Sequence[LogitStep], grad: Tensor, kept: list[Tensor | None]) -> Tensor:
    """Return the gradient of the logits before the steps, given that of their result, which is overwritten."""
    for step, saved in zip(reversed(steps), reversed(kept), strict=True):
        grad = step.backward(grad, saved)
    return grad


def _is_number(x: object) -> TypeGuard[int | float]:
    return isinstance(x, int | float) and not isinstance(x, bool)


_TANH: frozenset[object] = frozenset({torch.tanh, Tensor.tanh})
_MUL: frozenset[object] = frozenset({torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__})
_DIV: frozenset[object] = frozenset({torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide, Tensor.true_divide})
_FLOAT: frozenset[object] = frozenset({Tensor.float})
