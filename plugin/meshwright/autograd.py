"""The base of autograd functions: what a second derivative finds of them, and the types that torch does not declare.

Most backward passes here communicate, or return what forward has computed, so autograd records no graph of them. Under
``create_graph=True`` torch would take their gradients for constants, without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from meshwright.errors import UnreadableTensorError


class Node(FunctionCtx):
    """What the forward of an autograd function keeps for backward: attributes of its own, and those of torch."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    if TYPE_CHECKING:

        def save_for_backward(self, *tensors: Tensor | None) -> None: ...
        def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...


def keeps_graph() -> bool:
    """Return whether the running backward pass keeps its graph for another one (``retain_graph=True``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def refuse_second_order(instead: str) -> None:
    """Raise in a backward pass with ``create_graph=True``, for gradients that have no graph.

    Args:
        instead: the sentence of the message that says what to write instead.

    Raises:
        UnreadableTensorError: if the running pass makes a graph of its gradients.
    """
    if torch.is_grad_enabled():  # autograd's engine turns gradients on in backward for create_graph alone
        raise UnreadableTensorError(
            "create_graph=True: this plan computes some gradients without a graph. A penalty on them would have no "
            f"gradient, or one of another size than on one device. {instead}"
        )


class RuntimeFunction(torch.autograd.Function):
    """An autograd function that raises where a second derivative would silently lack its part.

    Attributes:
        has_graph: whether backward consists of differentiable operations, so that a second derivative is right.
        is_linear: whether the gradients depend on the incoming ones alone, so that they are constants where these are.
        instead: what to write instead of a second derivative.
    """

    has_graph: ClassVar[bool] = False
    is_linear: ClassVar[bool] = False
    instead: ClassVar[str] = "Use a plan without these collectives: ParallelPlan(tp=1, cp=1, ep=1)"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "backward" in vars(cls) and not cls.has_graph:
            type.__setattr__(cls, "backward", staticmethod(_refusing(cls, cls.backward)))


def _refusing(cls: type[RuntimeFunction], backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def call(ctx: Node, *gradients: Tensor | None) -> Any:
        if not (cls.is_linear and all(x is None or not x.requires_grad for x in gradients)):
            refuse_second_order(cls.instead)
        return backward(ctx, *gradients)

    return call


class TensorFunction(RuntimeFunction):
    """An autograd function whose result is one tensor."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: object) -> Tensor: ...


class TensorsFunction(RuntimeFunction):
    """An autograd function whose result is several tensors."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: object) -> tuple[Tensor, ...]: ...
