"""Batches whose rows differ in images equal one process: the loss, every gradient, the norm and the weights.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.image_training import FOURS, PAIRS, Counts, one_process, train, train_each
from support.parity import pool_for
from support.vision_models import FAMILIES
from support.whole_runs import assert_equals_one_process

SPLIT = {"gradient_accumulation_steps": 2}
PLANS: dict[str, tuple[dict[str, Any], Counts]] = {
    "dp2": ({"dp": 2}, PAIRS),
    "dp2 zero1": ({"dp": 2, "zero_stage": 1}, PAIRS),
    "dp2 zero2": ({"dp": 2, "zero_stage": 2}, PAIRS),
    "dp2 zero3": ({"dp": 2, "zero_stage": 3}, PAIRS),
    "ga2": (SPLIT, PAIRS),
    "tp2+sp": ({"tp": 2, "sequence_parallel": True}, PAIRS),
    "pp2 mb1": ({"pp": 2, "micro_batch_size": 1}, PAIRS),
    "dp2 tp2+sp zero1": ({"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1}, PAIRS),
    "cp2 mb1": ({"cp": 2, "micro_batch_size": 1}, PAIRS),
    "dp2 zero2 ga2": ({"dp": 2, "zero_stage": 2, **SPLIT}, FOURS),
    "dp2 zero3 ga2": ({"dp": 2, "zero_stage": 3, **SPLIT}, FOURS),
    "dp2 pp2 mb1": ({"dp": 2, "pp": 2, "micro_batch_size": 1}, FOURS),
}


def families_of(plan_name: str) -> list[str]:
    refused = ("gemma3", "paligemma") if "cp2" in plan_name else ()  # for masks that see the tokens of a whole image
    return [family for family in FAMILIES if family not in refused]


@pytest.mark.crossing
@pytest.mark.parametrize("plan_name", PLANS)
def test_each_family_equals_one_process(plan_name: str, request: pytest.FixtureRequest) -> None:
    plan, counts = PLANS[plan_name]
    families = families_of(plan_name)
    if plan is SPLIT:
        results = [train_each(plan, families, counts)]
    else:
        results = pool_for(plan, request).run(train_each, plan, families, counts)
    for family in families:
        assert_equals_one_process([result[family] for result in results], one_process(family, counts))


SOME = [("qwen3_vl", "dp2 zero3"), ("smolvlm", "pp2 mb1"), ("mistral3", "dp2 zero3 ga2")]


@pytest.mark.parametrize(("family", "plan_name"), SOME)
def test_one_family_equals_one_process(family: str, plan_name: str, pool2: Any) -> None:
    plan, counts = PLANS[plan_name]
    assert_equals_one_process(pool2.run(train, plan, family, counts), one_process(family, counts))
