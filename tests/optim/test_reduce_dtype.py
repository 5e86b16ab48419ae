"""Gradients that travel in bfloat16: half the bytes, and the rounding that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import PlanError
from support.models import build, labels_for, tokens
from support.reference import make_optimizer
from support.traffic import Traffic

# A rank's gradients are rounded to 8 bits, by at most 2**-9 of each element, and without ZeRO so is their sum.
ROUNDED = 2**-8


def gradients(plan: dict[str, Any], passes: int) -> tuple[dict[str, torch.Tensor], int]:
    model = build("llama")
    model, _optimizer, _ = mw.to_distributed(model, make_optimizer(model), plan=mw.ParallelPlan(**plan))
    ids = tokens(4, 12)
    for index in range(passes):
        loss = model(input_ids=ids + index, labels=labels_for(ids + index)).loss
        with Traffic() as backward:
            loss.backward()
    sent = backward.bytes["reduce_scatter" if plan["zero_stage"] else "all_reduce"]
    return {name: g for name, g in mw.full_gradients(model).items() if g is not None}, sent


def differences(zero_stage: int, passes: int) -> tuple[list[float], float]:
    """The relative difference of each gradient from the exact one, and the share of the bytes."""
    exact, all_bytes = gradients({"dp": 2, "zero_stage": zero_stage}, passes)
    rounded, sent = gradients({"dp": 2, "zero_stage": zero_stage, "reduce_dtype": "bfloat16"}, passes)
    assert exact.keys() == rounded.keys()
    assert all(g.dtype is torch.float32 for g in rounded.values())
    return [float((rounded[name] - g).norm() / g.norm()) for name, g in exact.items()], sent / all_bytes


@pytest.mark.parametrize(("zero_stage", "passes"), [(0, 1), (1, 1), (2, 2), (3, 1)])
def test_half_the_bytes_and_the_rounding_of_bfloat16(zero_stage: int, passes: int, pool2: Any) -> None:
    found, share = pool2.run(differences, zero_stage, passes)[0]  # rank 0 has the whole gradients
    assert share == 0.5
    # In a sum of two ranks that nearly cancel, each rank's rounding weighs more: four times in this model's norms.
    assert 1e-5 < max(found) <= 4 * ROUNDED, found


def of_sixteen_bits() -> None:
    mw.to_distributed(build("llama").bfloat16(), plan="dp2 reduce=bf16")


def of_an_engine() -> None:
    config = mw.ToDistributedConfig(plan="dp2 reduce=bf16", engine="DeepSpeed")
    mw.to_distributed(build("llama"), config=config)


@pytest.mark.parametrize(("call", "words"), [
    (of_sixteen_bits, "bfloat16 weights travel in 16 bits already; leave it out"),
    (of_an_engine, "DeepSpeed, which reduces the gradients itself"),
])  # fmt: skip
def test_what_it_would_not_change_is_refused(call: Any, words: str, pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(call):
        assert kind == "PlanError" and words in message


@pytest.mark.parametrize(("fields", "words"), [
    ({"tp": 2, "reduce_dtype": "bfloat16"}, "dp=1 and cp=1; leave it out"),
    ({"dp": 2, "reduce_dtype": "float16"}, "reduce_dtype='float16' must be"),
    ({"dp": 2, "grad_reduce_dtype": "bfloat16"}, "reduce_dtype='bfloat16'"),
])  # fmt: skip
def test_wrong_fields(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        mw.ParallelPlan(**fields)


def test_a_dtype_of_torch_is_its_name() -> None:
    plan = mw.ParallelPlan(dp=2, reduce_dtype=torch.bfloat16)  # type: ignore[arg-type]
    assert plan == mw.ParallelPlan(dp=2, reduce_dtype="bfloat16") and plan.label == "dp2 zero0 reduce=bf16"


def test_verify_compares_exact_numbers_only() -> None:
    with pytest.raises(PlanError, match="rounds gradients"):
        mw.verify(build, "dp2 reduce=bf16")
