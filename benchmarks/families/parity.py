"""One family on two ranks with sequence parallelism against the same program on one device, in float64.

Tolerance 1e-10 relative to a tensor's largest value: only the order of sums differs, about 1e-16 a sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks.families.models import build
from tests.support.exact import Float64, relative_difference

TOLERANCE = 1e-10
PLAN = mw.ParallelPlan(tp=2, sequence_parallel=True)
ROWS, LENGTH = 2, 11  # a length that 2 does not divide


@dataclass
class Numbers:
    """What one pass of a model leaves for comparison."""

    logits: Tensor
    loss: float
    gradients: dict[str, Tensor] = field(default_factory=dict)


def batch(*, packed: bool = False) -> dict[str, Tensor]:
    """Rows of random tokens; packed, two documents a row."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[1, :4] = -100
    if not packed:
        return {"input_ids": ids, "labels": labels}
    positions = torch.cat([torch.arange(LENGTH // 2), torch.arange(LENGTH - LENGTH // 2)])
    return {"input_ids": ids, "labels": labels, "position_ids": positions.expand(ROWS, -1)}


def numbers(model: nn.Module, inputs: dict[str, Tensor], *, distributed: bool) -> Numbers:
    """Logits in evaluation, where they are whole; loss and whole gradients of one training step."""
    model.eval()
    with torch.no_grad():
        logits = model(**{name: x for name, x in inputs.items() if name != "labels"}).logits.clone()
    model.train()
    loss = model(**inputs).loss
    loss.backward()
    if distributed:
        return Numbers(logits, loss.item(), mw.full_gradients(model))
    return Numbers(logits, loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def differences(model_type: str, *, packed: bool = False, **overrides: Any) -> dict[str, float]:
    """The relative difference of logits, loss and every gradient that two ranks make; every rank calls it.

    Raises:
        AssertionError: if a parameter has a gradient in one program only.
    """
    inputs = batch(packed=packed)
    with Float64(), _default_dtype(torch.float64):
        expected = numbers(build(model_type, **overrides), inputs, distributed=False)
        model = mw.to_distributed(build(model_type, **overrides), config=mw.ToDistributedConfig(plan=PLAN))[0]
        actual = numbers(model, inputs, distributed=True)
    found = {
        "logits": relative_difference(actual.logits, expected.logits),
        "loss": abs(actual.loss - expected.loss) / abs(expected.loss),
    }
    if torch.distributed.get_rank() == 0:  # which alone has whole gradients
        assert actual.gradients.keys() == expected.gradients.keys(), actual.gradients.keys() ^ expected.gradients.keys()
        # A gradient that is zero but for rounding (a key's bias) is compared with the largest of all.
        largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
        for name, gradient in expected.gradients.items():
            if gradient.abs().max() > 1e-12 * largest:
                found[name] = relative_difference(actual.gradients[name], gradient)
            else:
                found[name] = (actual.gradients[name] - gradient).abs().max().item() / largest
    return found
