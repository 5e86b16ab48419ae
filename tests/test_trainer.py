"""MeshwrightTrainer under every plan equals the stock Trainer on one process.

Tolerance 1e-5 relative: float32 sums differ by about 1e-7 with their order, and 20 steps at a learning rate at which
training is stable amplify that less than 100 times (6e-7 measured at worst).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.trainers import Run, run_trainer

TOLERANCE = 1e-5
STEPS = 20

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "dp2": {"dp": 2},
    "tp2+sp x dp2": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "dp2+zero1": {"dp": 2, "zero_stage": 1},
}

FULL = {"max_steps": STEPS, "rows": 37, "evaluated": 11, "predicted": 7}


def pool_for(plan: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"pool{plan.get('dp', 1) * plan.get('tp', 1)}")


@functools.cache
def reference(**options: Any) -> Run:
    return run_trainer("unused", **options)


def largest_difference(actual: list[float], expected: list[float]) -> float:
    assert len(actual) == len(expected) > 0
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(actual, expected, strict=True))


def assert_same_training(actual: Run, expected: Run) -> None:
    assert actual.epochs == expected.epochs and actual.learning_rates == expected.learning_rates
    differences = {
        "losses": largest_difference(actual.losses, expected.losses),
        "norms": largest_difference(actual.norms, expected.norms),
    }
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.parametrize("name", PLANS)
def test_20_steps_evaluation_and_predictions_equal_one_process(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    ranks = pool_for(PLANS[name], request).run(run_trainer, tmp_path, PLANS[name], **FULL, timeout=200)
    expected = reference(**FULL)
    for run in ranks:
        assert_same_training(run, expected)
        # 11 and 7 rows, each once and in order, though neither is a multiple of the ranks or of the batch.
        assert run.metrics["eval_rows"] == 11 and run.metrics["eval_placed"] == expected.metrics["eval_placed"]
        assert largest_difference(list(run.metrics.values()), list(expected.metrics.values())) <= TOLERANCE
        assert np.array_equal(run.label_ids, expected.label_ids)
        assert np.allclose(run.predictions, expected.predictions, rtol=0, atol=TOLERANCE)
