"""Linear layers of all kinds: their sizes inside of adapters, and how each computes its output and its two gradients
apart.

Overlap, zero-bubble schedules, regathering and the chunked head know a linear layer by its :class:`LinearKernel` alone.

A projection may be wrapped in adapters; these functions look inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from meshwright.autograd import Node, TensorFunction
from meshwright.layout.packed_weights import matrix_shape
from meshwright.roles.adapters import projection
from meshwright.temporarily import without_replacements

# Takes the gradient of a linear layer's output; returns that of its weight, or None if it is computed elsewhere.
WeightGradient = Callable[[Tensor], Tensor | None]


class LinearKernel(ABC):
    """Computes ``y = x W^T + b`` for one kind of linear layer, which stores ``W`` and ``b`` as ``weight`` and ``bias``.

    The methods make no graph. Tensors have the shapes ``x [..., in]``, ``y [..., out]``; ``weight`` and ``bias`` have
    the dtype of ``x``. Each rank calls them for its rows of ``W``, or for its columns and a part of ``x``.

    Attributes:
        output_dim: the dim of the weight that is the output.
        needs_bias: whether the layer's own forward fails if the bias is None.
        is_differentiable: whether autograd can differentiate :meth:`forward` itself.
        is_token_wise: whether what it computes for a token depends on no other token, so that it may run in chunks.
        casts_weight: whether the weight is cast to the dtype of ``x`` first; otherwise it comes in its own.

    Example:
        >>> class HalfKernel(LinearKernel):
        ...     def forward(self, x, weight, bias, *, out=None):
        ...         y = F.linear(x / 2, weight, bias)
        ...         return y if out is None else out.copy_(y)
        ...     def input_gradient(self, gradient, weight, *, out=None):
        ...         return torch.matmul(gradient / 2, weight, out=out)
        ...     def weight_gradient(self, x, gradient, *, total=None):
        ...         own = gradient.flatten(0, -2).t() @ x.flatten(0, -2) / 2
        ...         return own if total is None else total.add_(own)
        >>> register_linear(HalfLinear, HalfKernel())  # doctest: +SKIP
    """

    output_dim: ClassVar[int] = 0
    needs_bias: ClassVar[bool] = False
    is_differentiable: ClassVar[bool] = False
    is_token_wise: ClassVar[bool] = True
    casts_weight: ClassVar[bool] = True

    def of_dtype(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight as the methods take it beside an input of a dtype."""
        return weight.to(dtype) if self.casts_weight else weight

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
        """Return the output, written to ``out`` if given."""

    @abstractmethod
    def input_gradient(self, gradient: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the gradient of the input from that of the output, written to ``out`` if given."""

    @abstractmethod
    def weight_gradient(self, x: Tensor, gradient: Tensor, *, total: Tensor | None = None) -> Tensor:
        """Return the gradient of the weight, added in place to ``total`` if given, which on CUDA may be wider."""

    def fit(self, module: nn.Module) -> None:  # noqa: B027
        """Set the sizes that the layer's own forward reads to those of this rank's weight; most forwards read none."""

    def with_graph(self, x: Tensor, weight: Tensor, bias: Tensor | None, take: WeightGradient | None = None) -> Tensor:
        """Return the output; backward gives the gradients of ``x`` and ``bias``, and that of the weight by ``take``.

        Args:
            x: the input.
            weight: the weight, in any dtype; detached if ``take`` is None.
            bias: the bias, in any dtype.
            take: computes the gradient of the weight.
        """
        with torch.autocast(x.device.type, enabled=False):
            return _LinearNode.apply(x, weight, bias, self, take)


class _PlainKernel(LinearKernel):
    """The kernel of ``nn.Linear``."""

    is_differentiable = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    def input_gradient(self, gradient: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.matmul(gradient, weight, out=out)

    def weight_gradient(self, x: Tensor, gradient: Tensor, *, total: Tensor | None = None) -> Tensor:
        rows = x if x.ndim == 2 else x.flatten(0, -2)
        gradients = gradient if gradient.ndim == 2 else gradient.flatten(0, -2)
        if total is None:
            return gradients.t() @ rows
        if total.dtype == rows.dtype:
            return total.addmm_(gradients.t(), rows)
        # The product is not rounded to the narrower dtype before it is added.
        return torch.addmm(total, gradients.t(), rows, out_dtype=total.dtype, out=total)

    def with_graph(self, x: Tensor, weight: Tensor, bias: Tensor | None, take: WeightGradient | None = None) -> Tensor:
        # autograd's own node costs less time on the host
        return self.forward(x, weight, bias) if take is None else super().with_graph(x, weight, bias, take)


class _TransposedKernel(_PlainKernel):
    """The kernel of GPT-2's ``Conv1D``, whose weight is ``[in, out]``."""

    output_dim = 1
    needs_bias = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
        return super().forward(x, weight.t(), bias, out=out)

    def input_gradient(self, gradient: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        return super().input_gradient(gradient, weight.t(), out=out)

    def weight_gradient(self, x: Tensor, gradient: Tensor, *, total: Tensor | None = None) -> Tensor:
        return super().weight_gradient(gradient, x, total=total)

    def fit(self, module: nn.Module) -> None:
        module.nf = module.get_parameter("weight").shape[1]  # type: ignore[assignment]  # the width of its output


class _LinearNode(TensorFunction):
    """The autograd node of a kernel."""

    instead = "Use linear layers without float8, and a schedule that does not split backward, schedule='1f1b'"

    @staticmethod
    def forward(
        ctx: Node, x: Tensor, weight: Tensor, bias: Tensor | None, kernel: LinearKernel, take: WeightGradient | None
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.kernel, ctx.take, ctx.dtype = kernel, take, x.dtype
        return kernel.forward(x, kernel.of_dtype(weight, x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Node, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        with torch._C.DisableTorchFunctionSubclass():
            weight = ctx.saved_tensors[0].detach()  # this rank's part, whose shape is not that of the parameter
        of_input = ctx.kernel.input_gradient(gradient, ctx.kernel.of_dtype(weight, ctx.dtype)) if needs_input else None
        of_weight = ctx.take(gradient) if needs_weight and ctx.take is not None else None
        of_bias = gradient.flatten(0, -2).sum(0) if needs_bias else None
        return of_input, of_weight, of_bias, None, None


PLAIN = _PlainKernel()
# Each class's kernel, and the forward that it knows: a program may give the class another one.
_KERNELS: dict[type[nn.Module], tuple[LinearKernel, Callable[..., Tensor]]] = {nn.Linear: (PLAIN, nn.Linear.forward)}
_TRANSPOSED = _TransposedKernel()
_OWN = "_meshwright_kernel"  # the attribute of a layer with a kernel of its own


def register_linear(kind: type[nn.Module], kernel: LinearKernel) -> None:
    """Register the kernel of a class of linear layers, for the class and the subclasses that keep its forward.

    Args:
        kind: the class, such as a subclass of ``nn.Linear`` with a forward of its own.
        kernel: what its forward computes, and the gradients.
    """
    _KERNELS[kind] = kernel, kind.forward


def set_kernel(module: nn.Module, kernel: LinearKernel) -> None:
    """Give one layer a kernel of its own, which is copied with the layer."""
    object.__setattr__(module, _OWN, kernel)


def kernel_of(module: nn.Module) -> LinearKernel | None:
    """Return the kernel of a linear layer; None if only the layer's own forward knows how it computes."""
    kernel = form_of(module)
    is_own = vars(module).get(_OWN) is not None
    return kernel if is_own or without_replacements(module, "forward") is type(module).forward else None


def form_of(module: nn.Module) -> LinearKernel | None:
    """Return the kernel of a linear layer's class, which has its weights in the same form, whatever it computes."""
    own: LinearKernel | None = vars(module).get(_OWN)
    if own is not None:
        return own
    for kind in type(module).__mro__:
        if kind in _KERNELS:
            kernel, forward = _KERNELS[kind]
            return kernel if type(module).forward is forward else None
    # transformers' class, and copies of it in models with code of their own
    is_transposed = type(module).__name__ == "Conv1D" and hasattr(module, "nf") and module.weight.ndim == 2
    return _TRANSPOSED if is_transposed else None


def is_projection(module: nn.Module) -> bool:
    """Return whether a module is a linear projection, with or without a bias or adapters."""
    module = projection(module)
    return isinstance(module, nn.Linear) or form_of(module) is not None


def output_dim(module: nn.Module) -> int:
    """Return the dim of a module's weight that is its output."""
    kernel = form_of(projection(module))
    return 0 if kernel is None else kernel.output_dim


def out_features(module: nn.Module) -> int:
    return matrix_shape(weight_of(projection(module)))[output_dim(module)]


def in_features(module: nn.Module) -> int:
    return matrix_shape(weight_of(projection(module)))[1 - output_dim(module)]


def weight_of(module: nn.Module) -> Tensor:
    """Return a module's weight, or what a parametrization computes it from, which may change by being computed."""
    if not is_parametrized(module, "weight"):
        return module.weight  # type: ignore[return-value]
    computed = module.get_submodule("parametrizations.weight")
    return computed.original if hasattr(computed, "original") else computed.original0  # type: ignore[return-value]
