"""Types for autograd functions: torch declares neither what ``apply`` returns nor what a node keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


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


class TensorFunction(torch.autograd.Function):
    """An autograd function whose result is one tensor."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: object) -> Tensor: ...


class TensorsFunction(torch.autograd.Function):
    """An autograd function whose result is several tensors."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: object) -> tuple[Tensor, ...]: ...
