"""Heads in chunks for families whose forward calls CrossEntropyLoss itself: the loss and gradients of one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import meshwright as mw
from conformance.families.models import DENSE, build
from meshwright.errors import UnreadableTensorError
from meshwright.parallel.losses.causal_lm import calls_cross_entropy
from support.exact import Float64, relative_difference
from support.fused_loss import counting_fused_losses
from support.models import labels_for, tokens
from support.short_programs import train

FAMILIES = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
    "whisper",
)  # fmt: skip
ROWS, LENGTH = 3, 12


def half_of_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, with a factor of the program's own."""
    return model(**batch).loss / 2


def run(plan: dict[str, Any] | None, families: tuple[str, ...], ignored: int = -100) -> list[Any]:
    """For each family, the loss, the whole gradients and how often the fused loss ran, with chunks of five tokens."""
    results = []
    with counting_fused_losses(tokens_per_chunk=5) as runs, Float64():
        for family in families:
            runs.clear()
            model: Any = build(family)
            ids = tokens(ROWS, LENGTH)
            labels = labels_for(ids)
            assert (labels == -100).any()
            batches = [{"input_ids": ids, "labels": labels.masked_fill(labels == -100, ignored)}]
            (loss,), gradients = train(model, plan, batches, loss_of=half_of_loss, loss_averages_over="labels")
            results.append((loss, gradients, len(runs)))
    return results


def off_by(actual: Any, expected: Any) -> float:
    """The largest relative difference of the loss and the gradients."""
    (loss, gradients, _), (expected_loss, wanted, _) = actual, expected
    found = [abs(loss / expected_loss - 1)]
    largest = max(gradient.abs().max() for gradient in wanted.values())
    for name, gradient in wanted.items():
        if gradient.abs().max() > 1e-12 * largest:  # a key's bias has rounding only
            found.append(relative_difference(gradients[name], gradient))
    return max(found)


def check(actual: list[Any], families: tuple[str, ...]) -> None:
    for family, found, expected in zip(families, actual, run(None, families), strict=True):
        assert found[2] == 1 and expected[2] == 0, family
        # float64: only the order of sums differs; a chunk that counts twice is off by a fifth.
        assert off_by(found, expected) < 1e-10, family


def test_on_one_process() -> None:
    check(run({}, FAMILIES), FAMILIES)


def test_wrong_answers_would_be_caught() -> None:
    """Labels that count although they are ignored, and the labels of the next token."""
    (expected,) = run(None, ("bart",))
    assert off_by(run({}, ("bart",), ignored=3)[0], expected) > 1e-3
    with mock.patch("meshwright.parallel.losses.causal_lm.valid_labels", lambda labels, _: (labels > -1000).sum()):
        assert off_by(run({}, ("bart",))[0], expected) > 1e-3


PLANS: dict[str, dict[str, Any]] = {
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "dp2 zero3": {"dp": 2, "zero_stage": 3},
    "dp2 ga2": {"dp": 2, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("plan", PLANS)
def test_on_two_ranks(plan: str, pool2: Any) -> None:
    """97 words over two ranks are 49 and 48, three rows 2 and 1, and 36 tokens are no multiple of five."""
    families = FAMILIES if plan == "tp2+sp" else ("bart", "whisper")
    found = pool2.run(run, PLANS[plan], families, timeout=300)[0]
    runs = PLANS[plan].get("gradient_accumulation_steps", 1)
    check([(loss, gradients, count / runs) for loss, gradients, count in found], families)


def test_which_families() -> None:
    assert all(calls_cross_entropy(build(family)) for family in FAMILIES)
    assert not any(calls_cross_entropy(build(family)) for family in sorted(set(DENSE) - set(FAMILIES))[::6])


def test_logits_are_computed_when_they_are_read() -> None:
    with Float64():
        model: Any = build("bart")
        batch = {"input_ids": tokens(ROWS, LENGTH), "labels": tokens(ROWS, LENGTH, seed=1)}
        expected = model(**batch).logits
        model, _, _ = mw.to_distributed(model, plan="dp1")
        assert torch.equal(model(**batch).logits, expected)


def read_under_tp() -> str:
    model, _, _ = mw.to_distributed(build("bart"), plan="tp2")
    outputs: Any = model(input_ids=tokens(ROWS, LENGTH), labels=tokens(ROWS, LENGTH))
    with pytest.raises(UnreadableTensorError) as error:
        outputs.logits.sum()
    return str(error.value)


def test_sharded_logits_raise(pool2: Any) -> None:
    assert all("gather_logits=True" in said for said in pool2.run(read_under_tp))
