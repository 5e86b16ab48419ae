"""A model with parts where Liger puts its kernels equals one process without them.

Tolerance 1e-10 of a tensor's largest value (``support/parity.py``): the formulas and the plans differ from one process
in the order of sums alone, about 1e-16 a sum, and AdamW divides tiny differences by tiny moments.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from support import liger_parts
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.parity import pool_for
from support.tiers import crossings
from support.whole_runs import assert_equals_one_process, train_whole

PLANS: dict[str, dict[str, Any]] = {
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "dp2 zero3": {"dp": 2, "zero_stage": 3},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
}


def batches() -> list[dict[str, Tensor]]:
    made = [tokens(4, 12, seed=step) for step in range(2)]
    return [{"input_ids": ids, "labels": labels_for(ids)} for ids in made]


def train(plan: dict[str, Any] | None, way: str | None) -> dict[str, Tensor]:
    """Train with parts in the model that is there ("instances"), in one that is built later ("module"), or without."""
    with Float64():
        if way is None:
            return train_whole(build("llama", mlp_bias=False).double(), plan, batches)
        model = build("llama", mlp_bias=False) if way == "instances" else None  # Liger's MLP has no biases
        with liger_parts.in_the_module():
            model = model or build("llama", mlp_bias=False)
            if way == "instances":
                liger_parts.in_the_instances(model)
            else:
                assert type(model.model.norm) is liger_parts.Norm
            return train_whole(model.double(), plan, batches)


def train_planted() -> dict[str, Tensor]:
    with mock.patch.object(liger_parts.Norm, "forward", lambda self, x: x * self.weight):
        return train(PLANS["pp2"], "instances")


@functools.cache
def reference() -> dict[str, Tensor]:
    return train(None, None)


@pytest.mark.parametrize(("plan", "way"), crossings(
    [(plan, way) for plan in PLANS for way in ("instances", "module")], but=[(plan, "instances") for plan in PLANS]
))  # fmt: skip
def test_equals_one_process(plan: str, way: str, request: pytest.FixtureRequest) -> None:
    assert_equals_one_process(pool_for(PLANS[plan], request).run(train, PLANS[plan], way), reference())


def test_the_parts_run(pool2: Any) -> None:
    """So that the comparisons above could fail."""
    assert relative_difference(pool2.run(train_planted)[0]["loss 0"], reference()["loss 0"]) > 1e-3
