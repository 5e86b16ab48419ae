"""Runs the loss's kernels for GPUs in Triton's interpreter, on the CPU; prints how far they are from float64, in JSON.

Run with ``TRITON_INTERPRET=1`` in a process of its own, since torch behaves differently where it finds Triton.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.mesh.axes import Axis
from meshwright.parallel.losses import cross_entropy
from meshwright.parallel.losses.chunked_head import ChunkedHeadLoss, ChunkedLoss
from meshwright.parallel.losses.cross_entropy import Words, exponentials_, gradient_

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
IGNORED, FACTOR, BLOCK = -100, 0.375, 64


@dataclass(frozen=True)
class Case:
    """Logits of a rank: their number, columns and dtype, and how many columns are words."""

    dtype: str
    tokens: int
    columns: int
    vocab: int
    smoothing: float = 0.0


CASES = tuple(
    Case(dtype, *sizes)
    for dtype in DTYPES
    for sizes in ((7, 200, 200), (7, 200, 190, 0.1), (1, 64, 3), (5, 130, 130, 0.2), (0, 64, 64))
)


@dataclass(frozen=True)
class Errors:
    """The largest differences from float64: of losses, and of gradients, relative to the largest of a token."""

    loss: float
    gradient: float
    padding: float
    by_chunks: float


def errors(case: Case, target_shift: int) -> Errors:
    """Compare the kernels' results with float64; a shift of the targets is a planted fault."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(case.tokens, case.columns, generator=generator)).to(DTYPES[case.dtype])
    targets = torch.randint(case.vocab, (case.tokens,), generator=generator)
    targets[1:2] = IGNORED
    words = Words.of_columns(
        case.columns, vocab_size=case.vocab, ignored=IGNORED, axis=Axis("tp"), smoothing=case.smoothing
    )
    exact = logits[:, : case.vocab].double().requires_grad_()
    losses = F.cross_entropy(exact, targets, reduction="none", label_smoothing=case.smoothing)
    (losses.sum() * FACTOR).backward()
    given, shifted = logits.clone(), targets.where(targets < 0, (targets + target_shift) % case.vocab)
    found, softmax = exponentials_(given, shifted, words)
    assert torch.equal(given, logits), "the first kernel only reads"
    version = given._version
    gradient = gradient_(given, softmax, words, torch.tensor(FACTOR))
    assert gradient is given, "the second kernel writes in place"
    assert given._version > version or not case.tokens, "autograd refuses a second backward by the version"
    return Errors(
        loss=_largest(found - losses),
        gradient=_largest(
            (gradient[:, : case.vocab] - exact.grad) / exact.grad.abs().amax(1, keepdim=True).clamp(1e-30)
        ),
        padding=_largest(gradient[:, case.vocab :]),
        by_chunks=_by_chunks(case, words, shifted, targets),
    )


def _by_chunks(case: Case, words: Words, targets: Tensor, expected: Tensor) -> float:
    """Return how far the head and the loss in one operation are off, relative to the same in float64."""
    if not case.tokens:
        return 0.0
    generator = torch.Generator().manual_seed(1)
    dtype = DTYPES[case.dtype]
    inputs = [torch.randn(size, 16, generator=generator).to(dtype) for size in (case.tokens, case.columns)]

    def results(given: list[Tensor], labels: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in given]
        loss = ChunkedLoss(words=words, steps=(), dtype=given[0].dtype)
        total = ChunkedHeadLoss.apply(*leaves, None, labels, None, loss)
        return [total.detach(), *torch.autograd.grad(total, leaves)]

    wide = results([x.double() for x in inputs], expected)
    return max(float((x - y).norm() / y.norm()) for x, y in zip(results(inputs, targets), wide, strict=True))


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


if __name__ == "__main__":
    cross_entropy._BLOCK = BLOCK  # several blocks of words for a few of them
    cross_entropy.has_kernels = lambda x: x.dtype != torch.float64  # also on the CPU
    print(json.dumps([asdict(errors(case, int(sys.argv[1]))) for case in CASES]))
