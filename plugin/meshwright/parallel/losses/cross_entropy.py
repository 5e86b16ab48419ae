"""Cross-entropy over logits that are sharded along the vocabulary, in plain operations or in two kernels on a GPU.

Each rank reduces over its own words of the vocabulary. One small all-gather (three numbers per token) combines the
ranks' results. The logits are overwritten by their exponentials and then by their gradient, or on a GPU by their
gradient at once, because with 32k words they are by far the largest tensor of a step. Nothing else may read them (see
ShardedLogits).

::

    logits [N, W], 16 bits --statistics--> peak, sum of exponentials, target [N]   one read
    (the ranks of tp exchange them)
    logits [N, W]          --gradient----> gradient in the logits' memory          one read, one write

Plain operations read and write the logits ten times, and in 32 bits. On an H200 they took 9 ms for 4,096 tokens and
128,256 words, three times one of the head's matrix multiplications; the kernels take 0.8 ms. torch.compile fuses only
what it sees whole, and the ranks' exchange lies between the two passes. All arithmetic is in 32 bits.

Shape suffixes: N tokens, W words of this rank.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from meshwright.autograd import Node, TensorFunction
from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import all_gather

_BLOCK = 4096  # words that a program of a kernel holds at once
_WARPS = 8


def has_kernels(logits_NW: Tensor) -> bool:
    """Return whether the kernels take these logits; in float64 nothing is computed in 32 bits."""
    if not logits_NW.is_cuda or logits_NW.dtype == torch.float64 or logits_NW.stride(-1) != 1:
        return False
    if type(logits_NW) is not Tensor:  # a fake tensor of a traced step
        return _has_triton()
    return _works(logits_NW.device, logits_NW.dtype)


@functools.cache
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether Triton compiles the kernels here; if not, it is told once."""
    if not _has_triton():
        return False
    logits, column = torch.zeros(1, 8, device=device, dtype=dtype), torch.zeros(1, device=device, dtype=torch.int64)
    try:
        peak = statistics(logits, column, 8, sums=False)[0]
        fused_gradient_(logits, peak, peak, column, peak, None, 8)
    except Exception as error:
        warnings.warn(
            f"Triton cannot compile the kernels of the loss ({type(error).__name__}: {str(error).strip()[:200]}). The "
            "loss is computed by plain operations, which take more time and memory. Triton needs a C compiler (set CC "
            "or install gcc) and a GPU that it supports",
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def statistics(logits_NW: Tensor, column_N: Tensor, count: int, *, sums: bool) -> Tensor:
    """Return each token's largest logit, its sum of exponentials and its target's logit, ``[3, N]`` in float32.

    Args:
        logits_NW: the logits.
        column_N: the column of each token's target.
        count: the number of columns that are words.
        sums: whether to return the sums of the logits as well, ``[4, N]``.
    """
    found = logits_NW.new_empty(4 if sums else 3, len(logits_NW), dtype=torch.float32)
    if type(logits_NW) is Tensor and len(logits_NW):  # fake tensors of a traced step have no values
        with torch.cuda.device_of(logits_NW):
            _kernels()[0][(len(logits_NW),)](
                logits_NW, column_N, found, logits_NW.stride(0), count, len(logits_NW),
                BLOCK=_BLOCK, SUMS=sums, num_warps=_WARPS,
            )  # fmt: skip
    return found


def fused_gradient_(
    logits_NW: Tensor,
    peak_N: Tensor,
    scale_N: Tensor,
    column_N: Tensor,
    target_N: Tensor,
    even_N: Tensor | None,
    count: int,
) -> Tensor:
    """Overwrite logits by ``exp(logit - peak) * scale - even``, and less ``target`` in the column of the target.

    Args:
        logits_NW: the logits.
        peak_N: each token's largest logit.
        scale_N: the factor of each token's exponentials.
        column_N: the column of each token's target.
        target_N: what the target's column has less.
        even_N: what each word has less; None for nothing.
        count: the number of columns that are words; the gradient of the others is 0.
    """
    tokens, width = logits_NW.shape
    if type(logits_NW) is Tensor and tokens:
        with torch.cuda.device_of(logits_NW):
            _kernels()[1][(tokens, -(-width // _BLOCK))](
                logits_NW, peak_N, scale_N, column_N, target_N, scale_N if even_N is None else even_N,
                logits_NW.stride(0), count, width, BLOCK=_BLOCK, EVEN=even_N is not None, num_warps=_WARPS,
            )  # fmt: skip
        if not logits_NW.is_inference():
            torch.autograd.graph.increment_version(logits_NW)  # autograd does not see what a kernel of Triton writes
    return logits_NW


@functools.cache
def _kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def of_statistics(logits, columns, found, stride, count, tokens, BLOCK: tl.constexpr, SUMS: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        peak = -3.4028234663852886e38  # finite, so that a row without a word has no NaN
        total = 0.0
        summed = 0.0
        for start in range(0, count, BLOCK):
            words = start + tl.arange(0, BLOCK)
            x = tl.load(logits + row * stride + words, mask=words < count, other=-float("inf")).to(tl.float32)
            highest = tl.maximum(peak, tl.max(x, 0))
            total = total * tl.exp(peak - highest) + tl.sum(tl.exp(x - highest), 0)
            peak = highest
            if SUMS:
                summed += tl.sum(tl.where(words < count, x, 0.0), 0)
        target = tl.load(logits + row * stride + tl.load(columns + row)).to(tl.float32)
        tl.store(found + row, peak)
        tl.store(found + tokens + row, total)
        tl.store(found + 2 * tokens + row, target)
        if SUMS:
            tl.store(found + 3 * tokens + row, summed)

    @triton.jit  # type: ignore[untyped-decorator]
    def of_gradient(  # type: ignore[no-untyped-def]
        logits, peaks, scales, columns, targets, evens, stride, count, width, BLOCK: tl.constexpr, EVEN: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place = logits + row * stride + words
        x = tl.load(place, mask=words < width, other=0.0).to(tl.float32)
        grad = tl.exp(x - tl.load(peaks + row)) * tl.load(scales + row)
        if EVEN:
            grad -= tl.load(evens + row)
        grad = tl.where(words == tl.load(columns + row), grad - tl.load(targets + row), grad)
        grad = tl.where(words < count, grad, 0.0)
        tl.store(place, grad.to(logits.dtype.element_ty), mask=words < width)

    return of_statistics, of_gradient


# On CPU, work through the logits in pieces that stay in a core's cache from one pass to the next.
_CACHE_BYTES = 1 << 19
GATHERED = "Pass ToDistributedConfig(gather_logits=True)"  # in place of a loss that overwrites its logits


@dataclass(frozen=True, kw_only=True)
class Words:
    """The words of a vocabulary that one rank's logits score, and what does not count.

    Args:
        first: the index of this rank's first word in the full vocabulary.
        count: the number of this rank's columns that are words; the other columns are padding.
        ignored: the target of tokens that do not count.
        axis: the TP axis.
        vocab_size: the number of words in the full vocabulary.
        smoothing: the part of a target's probability that is spread evenly over the vocabulary (label smoothing).
    """

    first: int
    count: int
    ignored: int
    axis: Axis
    vocab_size: int
    smoothing: float = 0.0

    @classmethod
    def of_columns(cls, columns: int, *, vocab_size: int, ignored: int, axis: Axis, smoothing: float = 0.0) -> Words:
        """Return the words that a rank's columns score, if every rank of the axis has this number of columns."""
        first = min(axis.rank * columns, vocab_size)
        count = min(columns, vocab_size - first)
        return cls(first=first, count=count, ignored=ignored, axis=axis, vocab_size=vocab_size, smoothing=smoothing)


@dataclass(frozen=True)
class Softmax:
    """A softmax of which a rank has exponentials, ``softmax = exponentials * scale``, and where its targets are.

    Args:
        scale_N: the factor of each token's exponentials; 0 for a token that does not count.
        column_N: the column of each token's target, or 0.
        target_N: the probability that the loss wants for this column, 0 on a rank without the target.
        even_N: the probability that the loss wants for each word in addition; None without label smoothing.
        peak_N: what is subtracted from the logits before their exponentials, if these are still to be computed; None
            if they have overwritten the logits.
    """

    scale_N: Tensor
    column_N: Tensor
    target_N: Tensor
    even_N: Tensor | None
    peak_N: Tensor | None


def exponentials_(logits_NW: Tensor, targets_N: Tensor, words: Words) -> tuple[Tensor, Softmax]:
    """Return each token's loss (0 if it does not count) and the softmax, whose exponentials may overwrite the logits.

    Args:
        logits_NW: the logits, of 32 bits or more unless :func:`at_least_float32` leaves them as they are.
        targets_N: the target words.
        words: the words of this rank.
    """
    is_valid_N = targets_N != words.ignored
    column_N = targets_N - words.first
    is_ours_N = (column_N >= 0) & (column_N < words.count) & is_valid_N
    column_N = column_N.where(is_ours_N, 0)
    smoothing, are_kept = words.smoothing, has_kernels(logits_NW)
    if are_kept:
        statistics_SN = statistics(logits_NW, column_N, words.count, sums=bool(smoothing))
    else:
        statistics_SN = _overwritten(logits_NW, column_N, words)
    maximum_N, total_N, target_N = statistics_SN[:3]
    target_N.masked_fill_(~is_ours_N, 0)

    gathered = all_gather(statistics_SN[None], words.axis)
    peak_N = gathered[:, 0].amax(0)
    denominator_N = (gathered[:, 1] * (gathered[:, 0] - peak_N).exp()).sum(0)
    wanted_N = gathered[:, 2].sum(0)  # the mean of the logits under the probabilities that the loss wants
    even_N = None
    if smoothing:
        wanted_N = wanted_N * (1 - smoothing) + gathered[:, 3].sum(0) * (smoothing / words.vocab_size)
        even_N = is_valid_N.to(total_N.dtype) * (smoothing / words.vocab_size)
    loss_N = denominator_N.log() + peak_N - wanted_N

    # softmax = exp(logit - own peak) * scale; an ignored token has no gradient.
    scale_N = ((maximum_N - peak_N).exp() / denominator_N) * is_valid_N
    probability_N = is_ours_N.to(total_N.dtype) * (1 - smoothing)
    softmax = Softmax(scale_N, column_N, probability_N, even_N, maximum_N if are_kept else None)
    return loss_N.masked_fill_(~is_valid_N, 0), softmax


def _overwritten(exp_NW: Tensor, column_N: Tensor, words: Words) -> Tensor:
    """Overwrite logits by exponentials; return what ``softmax_kernels.statistics`` returns."""
    if words.count < exp_NW.shape[1]:
        exp_NW[:, words.count :] = -torch.inf
    statistics_SN = exp_NW.new_empty(4 if words.smoothing else 3, exp_NW.shape[0])
    maximum_N, total_N, target_N = statistics_SN[:3]
    for rows in _row_blocks(exp_NW):
        block = exp_NW[rows]
        # A rank with padding columns only (in a tiny vocabulary) has no finite maximum.
        peak = block.amax(1, keepdim=True).clamp_(min=torch.finfo(block.dtype).min)
        target_N[rows] = block.gather(1, column_N[rows, None])[:, 0]
        if words.smoothing:
            statistics_SN[3, rows] = block[:, : words.count].sum(1)
        block.sub_(peak).exp_()
        maximum_N[rows] = peak[:, 0]
        total_N[rows] = block.sum(1)
    return statistics_SN


def gradient_(exp_NW: Tensor, softmax: Softmax, words: Words, factor: Tensor | None) -> Tensor:
    """Overwrite what :func:`exponentials_` left by the gradient of the tokens' summed loss times ``factor``."""
    scale_N, target_grad_N, even_N = softmax.scale_N, -softmax.target_N, softmax.even_N
    if factor is not None:
        scale_N, target_grad_N = scale_N * factor, target_grad_N * factor
        even_N = None if even_N is None else even_N * factor
    if softmax.peak_N is not None:
        return fused_gradient_(exp_NW, softmax.peak_N, scale_N, softmax.column_N, -target_grad_N, even_N, words.count)
    for rows in _row_blocks(exp_NW):
        block = exp_NW[rows].mul_(scale_N[rows, None])
        if even_N is not None:
            block[:, : words.count].sub_(even_N[rows, None].to(block.dtype))
        block.scatter_add_(1, softmax.column_N[rows, None], target_grad_N[rows, None].to(block.dtype))
    return exp_NW


class VocabParallelCrossEntropy(TensorFunction):
    """The sum over valid tokens of -log softmax(logits)[target].

    Args (of ``apply``):
        logits_NW: the logits of this rank's words, float32 or float64; overwritten.
        targets_N: the target words by their index in the full vocabulary, or the ignored index.
        words: the part of the vocabulary that this rank scores.
    """

    instead = GATHERED

    @staticmethod
    def forward(ctx: Node, logits_NW: Tensor, targets_N: Tensor, words: Words) -> Tensor:
        exp_NW = logits_NW.detach()
        loss_N, softmax = exponentials_(exp_NW, targets_N, words)
        saved = (softmax.scale_N, softmax.column_N, softmax.target_N, softmax.even_N, softmax.peak_N)
        ctx.save_for_backward(exp_NW, *saved)
        ctx.words = words
        return loss_N.sum()

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> tuple[Tensor, None, None]:
        # In place, so a second backward through the same graph fails autograd's version check.
        grad_NW, *softmax = ctx.saved_tensors
        return gradient_(grad_NW, Softmax(*softmax), ctx.words, grad), None, None


def at_least_float32(x: Tensor) -> Tensor:
    """Cast half-precision logits to float32, since half precision is too coarse for a softmax over a vocabulary.

    The kernels for GPUs cast what they read themselves, so that logits that they take are returned as they are.
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) and not has_kernels(x) else x


def _row_blocks(x_NW: Tensor) -> list[slice]:
    num_tokens, row_bytes = x_NW.shape[0], x_NW.shape[1] * x_NW.element_size()
    step = max(1, _CACHE_BYTES // row_bytes) if x_NW.device.type == "cpu" else max(1, num_tokens)
    return [slice(start, start + step) for start in range(0, num_tokens, step)]
