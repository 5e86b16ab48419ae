"""How far a run under a plan is from one process."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import meshwright as mw
from support.exact import relative_difference
from support.reference import Result, train_family

# In float64 only the order of sums differs; tests/distribute/test_parity.py has the reasons.
TOLERANCE = 1e-10


@functools.cache
def reference(family: str, dtype: torch.dtype = torch.float64, **overrides: Any) -> Result:
    return train_family(family, dtype, None, **overrides)


def crossed(models: Iterable[str], plans: Iterable[str], *, every: int = 2) -> list[tuple[str, str]]:
    """Return the first model with every plan, and each other one with one plan of ``every``; neighbours alternate."""
    plans = list(plans)
    return [
        (model, plan)
        for number, model in enumerate(models)
        for place, plan in enumerate(plans)
        if number == 0 or (number + place) % every == 1
    ]


def pool_for(plan: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"pool{mw.ParallelPlan(**plan).world_size}")


def largest_differences(actual: Result, expected: Result) -> dict[str, float]:
    """The largest relative difference of each kind of result."""

    def of_numbers(a: list[float], b: list[float]) -> float:
        assert len(a) == len(b)
        return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))

    def of_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
        assert a.keys() == b.keys()
        return max(relative_difference(a[name], b[name]) for name in b)

    assert actual.first_logits is not None and expected.first_logits is not None
    return {
        "logits": relative_difference(actual.first_logits, expected.first_logits),
        "losses": of_numbers(actual.losses, expected.losses),
        "norms": of_numbers(actual.norms, expected.norms),
        "gradients": of_tensors(actual.first_gradients, expected.first_gradients),
        "weights": of_tensors(actual.weights, expected.weights),
    }
