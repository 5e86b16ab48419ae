"""The Trainer and TRL's trainers on models that see images, and on a hybrid: what they log is that of one process.

Tolerance 1e-5 relative and 2e-6 absolute: float32, and sums in another order; a reward is a small difference of sums.
Batches whose images went to other rows, or whose labels were divided otherwise, differ by 1e-2 and more.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from support.parity import pool_for
from support.tiers import crossings
from support.vision_trainers import run, run_accelerated

pytest.importorskip("trl", reason="the environment of the oldest versions has no TRL")

TP2_SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
ZERO2: dict[str, Any] = {"dp": 2, "zero_stage": 2}
MEASURED = ("runtime", "per_second")  # of the machine
SAVED = {"config.json", "model.safetensors", "processor_config.json", "tokenizer.json"}
CASES = [(kind, of_text, plan) for kind in ("sft", "dpo") for of_text in (False, True) for plan in (TP2_SP, ZERO2)]
CASES += [("trainer", False, TP2_SP), ("trainer", False, ZERO2)]


@functools.cache
def reference(kind: str, of_text: bool, folder: Path) -> list[dict[str, float]]:
    return run(kind, folder, None, of_text=of_text)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


@pytest.mark.parametrize(
    ("kind", "of_text", "plan"), crossings(CASES, but=[("trainer", False, TP2_SP), ("sft", False, ZERO2)]), ids=str
)
def test_a_trainer_equals_one_process(
    kind: str, of_text: bool, plan: dict[str, Any], one: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Four steps of two accumulated batches, whose last one of an epoch is not full, and two evaluations of 7 rows."""
    expected = reference(kind, of_text, one)
    assert sum("loss" in logs for logs in expected) == 4 and sum("eval_loss" in logs for logs in expected) == 2
    for found in pool_for(plan, request).run(run, kind, tmp_path, plan, of_text=of_text, timeout=280):
        for logs, wanted in zip(found, expected, strict=True):
            for key, value in wanted.items():
                if not any(word in key for word in MEASURED):
                    assert logs[key] == pytest.approx(value, rel=1e-5, abs=2e-6), key
    assert of_text or {path.name for path in tmp_path.iterdir()} >= SAVED


@pytest.mark.crossing
@pytest.mark.parametrize("plan", [TP2_SP, ZERO2], ids=str)
def test_accelerate_equals_one_process(plan: dict[str, Any], pool2: Any) -> None:
    expected = run_accelerated(None)
    assert len(expected) == 12 and len(set(expected)) == 12
    for found in pool2.run(run_accelerated, plan, timeout=280):
        assert found == pytest.approx(expected, rel=1e-5)
