"""Causal attention in blocks of flash kernels equals attention with a mask, whichever runs and documents there are.

Tolerance 1e-10 in float64: only the order of sums differs. On a GPU, whose kernels are of 16 bits, it is 2e-2 of values
of about 1.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.context import flash
from meshwright.context.flash import FlashCall, flash_attention, has_flash
from meshwright.context.key_exchange import RingKeys, WholeKeys
from meshwright.context.masks import Documents, causal_blocks
from meshwright.mesh.axes import Axis
from meshwright.parallel.sequence_parts import TokenRun

LENGTH = 24
RUNS = {
    "one": (TokenRun(0, 24),),
    "zigzag": (TokenRun(0, 12), TokenRun(12, 12)),
    "uneven": (TokenRun(0, 3), TokenRun(3, 17), TokenRun(20, 4)),
}
DOCUMENTS: dict[str, Documents] = {
    "plain": ((0,),),
    "packed": ((0, 5, 6, 12, 19),),
    "packed otherwise in each row": ((0, 20), (0, 1, 13)),
}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


def expected(inputs: list[Tensor], documents: Documents) -> Tensor:
    """Attention by plain operations, with a mask."""
    q, k, v = (x.double() for x in inputs)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    starts = torch.tensor([[sum(place >= s for s in row) for place in range(LENGTH)] for row in documents])
    seen = (starts[:, :, None] == starts[:, None]).tril()[:, None].to(q.device)
    scores = (0.3 * q @ k.transpose(-1, -2)).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keys", ["whole", "ring"])
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_equals_attention_with_a_mask(kind: str, runs: str, keys: str, device: str) -> None:
    dtype, tolerance = (torch.float64, 1e-10) if device == "cpu" else (torch.bfloat16, 2e-2)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 8)]
    inputs = [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]
    weights = torch.randn(2, LENGTH, 4, 8, generator=generator).to(device, dtype)
    exchange = WholeKeys(None) if keys == "whole" else RingKeys(Axis("cp"), (RUNS[runs],))
    call = FlashCall(keys=exchange, runs=RUNS[runs], documents=DOCUMENTS[kind], scale=0.3)
    own, wanted = flash_attention(call, *inputs), expected(inputs, DOCUMENTS[kind])
    torch.testing.assert_close(own.double(), wanted, atol=tolerance, rtol=tolerance)
    found = torch.autograd.grad((own * weights).sum(), inputs)
    gradients = torch.autograd.grad((wanted * weights).sum(), inputs)
    for x, y in zip(found, gradients, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_blocks_hold_each_visible_pair_once(kind: str, runs: str) -> None:
    documents = DOCUMENTS[kind]
    pairs = torch.zeros(2, LENGTH, LENGTH, dtype=torch.int64)
    for block in causal_blocks(documents, RUNS[runs], RUNS[runs]):
        size = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
        ones = torch.ones(size, dtype=torch.int64)
        pairs[block.rows, block.queries, block.keys] += ones.tril() if block.is_causal else ones
    starts = torch.tensor([[sum(place >= s for s in row) for place in range(LENGTH)] for row in documents])
    assert torch.equal(pairs, (starts[:, :, None] == starts[:, None]).tril().long().expand_as(pairs))


def test_kernels_that_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    assert has_flash(q, k, k)
    assert not has_flash(q, k, k[..., :4])
    assert not has_flash(q, k.double(), k)
    right = flash.TorchKernel.forward
    monkeypatch.setattr(flash.TorchKernel, "forward", lambda *args: (right(*args)[0], 1.01 * right(*args)[1]))
    flash.is_right.cache_clear()
    try:
        assert not has_flash(q, k, k)
    finally:
        flash.is_right.cache_clear()
