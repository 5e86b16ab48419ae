"""The head and the causal-LM loss in one operation, which never holds the logits of all tokens.

It works on one chunk of tokens after the other: logits, loss, and then the gradients of the hidden states and of the
head's weights, while the logits of the chunk are still there. So backward only scales gradients that forward has
computed, and no matrix multiplication runs twice.

Shape suffixes: N tokens, D width of the hidden states, W vocabulary entries of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.cross_entropy import Words, at_least_float32, exponentials_, gradient_, refuse_second_order
from meshwright.parallel.logit_steps import LogitStep, run, run_backward
from meshwright.plan.head_chunks import SUMMED_WORDS, head_chunk
from meshwright.roles.linear_kernel import PLAIN, LinearKernel


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


class ChunkedHeadLoss(torch.autograd.Function):
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

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_WD: Tensor,
        bias_W: Tensor | None,
        targets_N: Tensor,
        factor: Tensor | None,
        loss: ChunkedLoss,
    ) -> Tensor:
        needs = ctx.needs_input_grad[:3]
        with torch.autocast(hidden_ND.device.type, enabled=False):
            total, gradients = _forward(hidden_ND, weight_WD, bias_W, targets_N, factor, loss, needs)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [x.dtype if isinstance(x, Tensor) else None for x in (hidden_ND, weight_WD, bias_W)]
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_second_order()
        # In place unless backward will run again, since the gradient of the weight is as large as the weight.
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        found = []
        for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            scaled = None if saved is None else saved * grad if keeps else saved.mul_(grad)
            found.append(None if scaled is None else scaled.to(dtype))
        return *found, None, None, None


def _forward(
    hidden_ND: Tensor,
    weight_WD: Tensor,
    bias_W: Tensor | None,
    targets_N: Tensor,
    factor: Tensor | None,
    loss: ChunkedLoss,
    needs: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    num_tokens, dtype = hidden_ND.shape[0], loss.dtype
    chunk = head_chunk(num_tokens, hidden_ND.shape[1])
    own_weight = weight_WD.detach().to(dtype)
    own_bias = None if bias_W is None else bias_W.detach().to(dtype)
    gradients = _Gradients(loss.kernel, hidden_ND, own_weight, bias_W, needs, is_summed=chunk != num_tokens)
    losses = []
    logits = own_weight.new_empty(min(chunk, num_tokens), own_weight.shape[0])
    for rows in _chunks(num_tokens, chunk):
        hidden = hidden_ND[rows].detach().to(dtype)
        scores = logits[: hidden.shape[0]]
        loss.kernel.forward(hidden, own_weight, own_bias, out=scores)
        final, kept = run(loss.steps, scores)
        wide = at_least_float32(final)
        losses_N, softmax = exponentials_(wide, targets_N[rows], loss.words)
        losses.append(losses_N.sum())
        if any(needs):
            gradient_(wide, softmax, loss.words, factor)
            grad = final if wide is final else final.copy_(wide)
            del wide
            grad = run_backward(loss.steps, grad, kept)
            del kept
            gradients.add(rows, grad, hidden)
            del grad
        del final
    del logits
    total = torch.stack(losses).sum() if losses else hidden_ND.new_zeros((), dtype=_wide(dtype))
    return total, gradients.finished(weight_WD.dtype if factor is not None else None)


class _Gradients:
    """The gradients of the head's hidden states, weight and bias, summed over the chunks.

    Those of the weight and of the bias are sums over all tokens, so that 16-bit ones are summed in 32 bits.

    Args:
        kernel: how the head computes.
        hidden_ND: the hidden states.
        weight_WD: the weight, in the dtype of the matrix multiplication.
        bias_W: the bias, or None.
        needs: which of the three are needed.
        is_summed: whether there are several chunks.
    """

    def __init__(
        self,
        kernel: LinearKernel,
        hidden_ND: Tensor,
        weight_WD: Tensor,
        bias_W: Tensor | None,
        needs: Sequence[bool],
        *,
        is_summed: bool,
    ):
        self.kernel, self.weight_WD = kernel, weight_WD
        self.needs_weight = needs[1]
        summed = _wide(weight_WD.dtype)
        self.of_hidden = hidden_ND.new_empty(hidden_ND.shape, dtype=weight_WD.dtype) if needs[0] else None
        self.of_weight = weight_WD.new_zeros(weight_WD.shape, dtype=summed) if needs[1] and is_summed else None
        has_bias = needs[2] and bias_W is not None
        self.of_bias = weight_WD.new_zeros(weight_WD.shape[0], dtype=summed) if has_bias else None

    def add(self, rows: slice, grad: Tensor, hidden: Tensor) -> None:
        """Add the gradients of one chunk, given that of its logits."""
        if self.of_hidden is not None:
            self.kernel.input_gradient(grad, self.weight_WD, out=self.of_hidden[rows])
        if self.of_bias is not None:
            self.of_bias += grad.sum(0, dtype=self.of_bias.dtype)
        total = self.of_weight
        if not self.needs_weight:
            return
        if total is None or total.dtype == grad.dtype or grad.device.type == "cuda":
            self.of_weight = self.kernel.weight_gradient(hidden, grad, total=total)
            return
        # On CPU no product of 16-bit tensors has a 32-bit result, and a wide copy of the whole gradient would be large.
        wide = hidden.to(total.dtype)
        for sums, own in zip(total.split(SUMMED_WORDS), grad.split(SUMMED_WORDS, dim=1), strict=True):
            self.kernel.weight_gradient(wide, own.to(total.dtype), total=sums)

    def finished(self, weight_dtype: torch.dtype | None) -> list[Tensor | None]:
        """Return the gradients, that of the weight cast to ``weight_dtype`` if given."""
        of_weight = self.of_weight
        if of_weight is not None and weight_dtype is not None:
            of_weight = of_weight.to(weight_dtype)
        return [self.of_hidden, of_weight, self.of_bias]


def _chunks(num_tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(first, min(first + chunk, num_tokens)) for first in range(0, num_tokens, chunk))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
