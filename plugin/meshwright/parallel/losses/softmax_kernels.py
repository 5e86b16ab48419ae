"""Two kernels for the softmax of the loss on GPUs, which read and write logits in their own dtype.

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
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

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
        gradient_(logits, peak, peak, column, peak, None, 8)
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


def gradient_(
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
