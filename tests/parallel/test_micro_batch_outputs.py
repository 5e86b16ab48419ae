"""What a program reads of, and does to, a batch that the plan runs as micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.short_programs import distribute, gradients_of

pytestmark = pytest.mark.quick

SP2 = {"tp": 2, "sequence_parallel": True}


def program(plan: dict[str, Any] | None, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    batch = {"input_ids": tokens(6, 12), "labels": labels_for(tokens(6, 12))}
    model, _, (batch,) = distribute(plan, build("llama", use_cache=True).double(), None, [batch], **options)
    return model, batch


def read(plan: dict[str, Any] | None, keeps: bool, use: str, **options: Any) -> Any:
    with Float64():
        model, batch = program(plan, **({"gather_logits": True} if keeps else {}))
        output = model(**batch, **options)
        logits = output[1] if isinstance(output, tuple) else output.logits
        loss = output[0] if isinstance(output, tuple) else output.loss
        if use == "second loss":
            (loss + logits.square().mean()).backward()
        elif use == "metric":
            loss.backward()
            return logits.detach(), (logits.argmax(-1) == batch["input_ids"]).sum().item()
        loss.backward()
        return loss.item(), logits.dtype, gradients_of(model, plan).get("model.norm.weight")


@pytest.mark.parametrize("plan", [{"dp": 2}, SP2, {"dp": 2, "zero_stage": 3}], ids=str)
def test_logits_are_those_of_the_batch_or_say_that_they_are_not(plan: dict[str, Any], pool2: Any) -> None:
    """Row 13: a metric on ``outputs.logits`` sees all rows; a second loss on it is an error."""
    plan = {**plan, "micro_batch_size": 2}
    logits, hits = read(None, False, "metric")
    ranks = pool2.run(read, plan, True, "metric")
    rows = [x for x, _ in ranks] if "dp" in plan else [ranks[0][0]]
    assert relative_difference(torch.cat(rows), logits) < 1e-10
    assert sum(count for _, count in ranks) == hits * (1 if "dp" in plan else 2)
    for keeps, use, cure in [(False, "metric", "gather_logits=True"), (True, "second loss", "accumulate in the loop")]:
        for error, message in pool2.run_expecting_error(read, plan, keeps, use):
            assert error == "UnreadableTensorError" and cure in message, message


@pytest.mark.parametrize("plan", [{"dp": 2}, SP2], ids=str)
def test_outputs_may_be_a_tuple(plan: dict[str, Any], pool2: Any) -> None:
    """``return_dict=False`` with micro-batches."""
    expected = read(None, False, "", return_dict=False)
    loss, dtype, gradient = pool2.run(read, {**plan, "gradient_accumulation_steps": 2}, False, "", return_dict=False)[0]
    assert abs(loss - expected[0]) < 1e-12 and dtype == expected[1]
    assert relative_difference(gradient, expected[2]) < 1e-9
