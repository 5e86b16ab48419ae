"""The memory of the head and the loss in chunks at realistic sizes, on fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.head_memory import model_on_meta, traced
from meshwright.mesh.axes import Axis
from meshwright.parallel.fake_passes.measured_shape import LiveBytes
from meshwright.parallel.losses.chunked_head import ChunkedHeadLoss, ChunkedLoss
from meshwright.parallel.losses.cross_entropy import Words
from meshwright.plan.config import ParallelPlan
from meshwright_tools.tracing.trace import traceable

TOKENS, WIDTH, WORDS = 8192, 4096, 128_256


def peak_of_the_head(dtype: torch.dtype) -> int:
    """The peak of head and loss, in bytes, without their inputs."""
    with traceable(), FakeTensorMode():
        hidden = torch.empty(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
        weight = torch.empty(WORDS, WIDTH, dtype=dtype, requires_grad=True)
        targets = torch.zeros(TOKENS, dtype=torch.int64)
        words = Words.of_columns(WORDS, vocab_size=WORDS, ignored=-100, axis=Axis("tp"))
        what = ChunkedLoss(words=words, steps=(), dtype=dtype)
        with LiveBytes([hidden, weight, targets]) as memory:
            before = memory.now
            ChunkedHeadLoss.apply(hidden, weight, None, targets, torch.ones(()), what).backward()
            return memory.peak - before


@pytest.mark.parametrize(("dtype", "bytes_of_weight"), [(torch.float32, 4), (torch.bfloat16, 6)])
def test_what_the_head_and_the_loss_need(dtype: torch.dtype, bytes_of_weight: int) -> None:
    """The gradients of the hidden states and of the weight, and an eighth of whole 32-bit logits at most.

    16-bit gradients of the weight are summed in 32 bits, and both are there while the sum is rounded.
    """
    gradients = TOKENS * WIDTH * dtype.itemsize + WORDS * WIDTH * bytes_of_weight
    assert peak_of_the_head(dtype) <= gradients + 4 * TOKENS * WORDS / 8


def test_the_peak_of_a_step_beside_that_with_whole_logits() -> None:
    """With whole logits in both traces the ratio would be 1."""
    chunked, whole = (
        traced(model_on_meta(512, 1, TOKENS), ParallelPlan(), 1, TOKENS, is_whole=is_whole).peak
        for is_whole in (False, True)
    )
    assert chunked <= 0.3 * whole
