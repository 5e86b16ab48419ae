"""The head, the operations on its logits and the causal-LM loss in one operation, which never holds the logits of all
tokens.

It works on one chunk of tokens after the other: logits, loss, and then the gradients of the hidden states and of the
head's weights, while the logits of the chunk are still there. So backward only scales gradients that forward has
computed, and no matrix multiplication runs twice.

Shape suffixes: N tokens, D width of the hidden states, W vocabulary entries of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from meshwright.autograd import Node, TensorFunction, keeps_graph
from meshwright.parallel.losses.cross_entropy import GATHERED, Words, at_least_float32, exponentials_, gradient_
from meshwright.plan.parts import SUMMED_WORDS, head_chunk
from meshwright.roles.linear_kernel import PLAIN, LinearKernel


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
        options = [*rest, *kwargs.values()]
        if len(options) == 1 and set(kwargs) <= {"dtype"} and isinstance(options[0], torch.dtype):
            return Cast(dtype, options[0]) if options[0].is_floating_point else None
    return None


def run(steps: Sequence[LogitStep], x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Apply steps to logits, which are overwritten; return the result and what backward needs."""
    saves = []
    for step in steps:
        x, saved = step.forward(x)
        saves.append(saved)
    return x, saves


def run_backward(steps: Sequence[LogitStep], grad: Tensor, saves: list[Tensor | None]) -> Tensor:
    """Return the gradient of the logits before the steps, given that of their result, which is overwritten."""
    for step, saved in zip(reversed(steps), reversed(saves), strict=True):
        grad = step.backward(grad, saved)
    return grad


def _is_number(x: object) -> TypeGuard[int | float]:
    return isinstance(x, int | float) and not isinstance(x, bool)


_TANH: frozenset[object] = frozenset({torch.tanh, Tensor.tanh})
_MUL: frozenset[object] = frozenset({torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__})
_DIV: frozenset[object] = frozenset({torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide, Tensor.true_divide})
_FLOAT: frozenset[object] = frozenset({Tensor.float})


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss:
    """Describes what the head and the loss compute from hidden states.

    Args:
        words: the part of the vocabulary that this rank scores.
        steps: what the model does to the logits.
        dtype: the dtype of the head's matrix multiplication.
        kernel: how the head computes.
    """

    words: Words
    steps: tuple[LogitStep, ...]
    dtype: torch.dtype
    kernel: LinearKernel = PLAIN


class ChunkedHeadLoss(TensorFunction):
    """The sum over valid tokens of -log softmax(logits)[target], with logits = steps(hidden @ weight.T + bias).

    Args (of ``apply``):
        hidden_ND: the hidden states.
        weight_WD: the head's weight.
        bias_W: the head's bias, or None.
        targets_N: the target tokens, as indices in the full vocabulary, or the ignored index.
        factor: a number by which the gradients are multiplied before they are rounded to 16 bits, or None. The loss
            is not multiplied.
        loss: the description of the computation.
    """

    instead = GATHERED

    @staticmethod
    def forward(
        ctx: Node,
        hidden_ND: Tensor,
        weight_WD: Tensor,
        bias_W: Tensor | None,
        targets_N: Tensor,
        factor: Tensor | None,
        loss: ChunkedLoss,
    ) -> Tensor:
        inputs = (hidden_ND, weight_WD, bias_W)
        ctx.dtypes = [x.dtype if isinstance(x, Tensor) else None for x in inputs]
        with torch.autocast(hidden_ND.device.type, enabled=False):
            head = _Head(*inputs, ctx.needs_input_grad, loss)
            total = head.loss(targets_N, factor)
        ctx.save_for_backward(*head.finished(weight_WD.dtype if factor is not None else None))
        return total

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> tuple[object, ...]:
        # In place unless backward will run again, since the gradient of the weight is as large as the weight.
        keeps = keeps_graph()
        found = []
        for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            scaled = None if saved is None else saved * grad if keeps else saved.mul_(grad)
            found.append(None if scaled is None else scaled.to(dtype))
        return *found, None, None, None


class _Head:
    """A head in its pass over the chunks, and the gradients of its hidden states, weight and bias, summed over them.

    Those of the weight and of the bias are sums over all tokens, so that 16-bit ones are summed in 32 bits.

    Args:
        hidden_ND: the hidden states.
        weight_WD: the weight.
        bias_W: the bias, or None.
        needs: which of the three need a gradient.
        what: the description of the computation.
    """

    def __init__(
        self, hidden_ND: Tensor, weight_WD: Tensor, bias_W: Tensor | None, needs: Sequence[bool], what: ChunkedLoss
    ):
        self.hidden_ND, self.what, self.needs = hidden_ND, what, needs[:3]
        self.weight_WD = weight_WD.detach().to(what.dtype)
        self.bias_W = None if bias_W is None else bias_W.detach().to(what.dtype)
        num_tokens, summed = len(hidden_ND), _wide(what.dtype)
        self.chunk = head_chunk(
            num_tokens, hidden_ND.shape[1], element_bytes=widest(what.steps, what.dtype), cpu=not hidden_ND.is_cuda,
            frozen=not needs[1],
        )  # fmt: skip
        is_summed = self.chunk != num_tokens
        self.of_hidden = hidden_ND.new_empty(hidden_ND.shape, dtype=what.dtype) if needs[0] else None
        self.of_weight = self.weight_WD.new_zeros(weight_WD.shape, dtype=summed) if needs[1] and is_summed else None
        self.of_bias = None if self.bias_W is None or not needs[2] else torch.zeros_like(self.bias_W, dtype=summed)

    def loss(self, targets_N: Tensor, factor: Tensor | None) -> Tensor:
        """Return the sum of the tokens' losses, and compute the gradients, times ``factor``."""
        hidden_ND, what, losses = self.hidden_ND, self.what, []
        num_tokens = len(hidden_ND)
        logits = self.weight_WD.new_empty(min(self.chunk, num_tokens), len(self.weight_WD))
        for first in range(0, num_tokens, self.chunk):
            rows = slice(first, min(first + self.chunk, num_tokens))
            hidden = hidden_ND[rows].detach().to(what.dtype)
            scores = what.kernel.forward(hidden, self.weight_WD, self.bias_W, out=logits[: len(hidden)])
            final, saves = run(what.steps, scores)
            wide = at_least_float32(final)
            losses_N, softmax = exponentials_(wide, targets_N[rows], what.words)
            losses.append(losses_N.sum())
            if not any(self.needs):
                del wide, final
                continue
            gradient_(wide, softmax, what.words, factor)
            grad = final if wide is final else final.copy_(wide)
            del wide, final  # of logits that were cast, the gradient is cast back
            grad = run_backward(what.steps, grad, saves)
            del saves
            self.add(rows, grad, hidden)
            del grad
        return torch.stack(losses).sum() if losses else hidden_ND.new_zeros((), dtype=_wide(what.dtype))

    def add(self, rows: slice, grad: Tensor, hidden: Tensor) -> None:
        """Add the gradients of one chunk, given that of its logits."""
        if self.of_hidden is not None:
            self.what.kernel.input_gradient(grad, self.weight_WD, out=self.of_hidden[rows])
        if self.of_bias is not None:
            self.of_bias += grad.sum(0, dtype=self.of_bias.dtype)
        total = self.of_weight
        if not self.needs[1]:
            return
        if total is None or total.dtype == grad.dtype or grad.device.type == "cuda":
            self.of_weight = self.what.kernel.weight_gradient(hidden, grad, total=total)
            return
        # On CPU no product of 16-bit tensors has a 32-bit result, and a wide copy of the whole gradient would be large.
        wide = hidden.to(total.dtype)
        for sums, own in zip(total.split(SUMMED_WORDS), grad.split(SUMMED_WORDS, dim=1), strict=True):
            self.what.kernel.weight_gradient(wide, own.to(total.dtype), total=sums)

    def finished(self, weight_dtype: torch.dtype | None) -> list[Tensor | None]:
        """Return the gradients, that of the weight cast to ``weight_dtype`` if given."""
        of_weight = self.of_weight
        if of_weight is not None and weight_dtype is not None:
            of_weight = of_weight.to(weight_dtype)
        return [self.of_hidden, of_weight, self.of_bias]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
