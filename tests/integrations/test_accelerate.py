"""``meshwright_hf.accelerate.prepare``: the script of one process, under a plan.

Tolerance 1e-10 relative in float64, where only the order of sums differs (1e-16 a sum), and 20 AdamW steps amplify
that about a thousand times; see test_parity.py. In float32 it is the contract's 1e-5.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler

from meshwright_hf.accelerate.planned_loader import PlannedScheduler
from support.accelerated import Run, resume_script, run_script
from support.parity import pool_for
from support.tiers import crossing, crossings, nightly

TWENTY: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "dp2xtp2+sp+zero1": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1},
    "pp2xdp2+zero1": {"pp": 2, "dp": 2, "zero_stage": 1, "gradient_accumulation_steps": 2},
    "cp2xdp2+zero1": {"cp": 2, "dp": 2, "zero_stage": 1},
    "pp2xtp2+sp": {"pp": 2, "tp": 2, "sequence_parallel": True, "schedule": "zb-h1", "micro_batch_size": 1},
    "pp2xcp2+zero1": {"pp": 2, "cp": 2, "context": "ring", "zero_stage": 1, "micro_batch_size": 1},
}
PLANS = TWENTY | {
    "dp2": {"dp": 2},
    "pp2": {"pp": 2, "gradient_accumulation_steps": 2},
    "cp2": {"cp": 2, "context": "ring"},
    "dp2xtp2+sp+zero2": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 2},
    "dp2+zero3": {"dp": 2, "zero_stage": 3},
    "dp2xtp2+sp+zero3": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 3},
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@functools.cache
def reference(dtype: torch.dtype, dp: int) -> Run:
    """Stock accelerate in one process, with the global batch."""
    return run_script(None, dtype, dp)


def difference(actual: Run, expected: Run) -> float:
    """The largest relative difference of a loss, a norm or a learning rate."""
    pairs = []
    for name in ("losses", "norms", "rates"):
        pairs += list(zip(getattr(actual, name), getattr(expected, name), strict=True))
    assert pairs
    return max(abs(a - b) / abs(b) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "dtype"),
    crossings(
        # float32 repeats what float64 proves, so one plan of several axes is enough.
        [*((name, torch.float64) for name in TWENTY), ("dp2xtp2+sp+zero1", torch.float32)],
        but=[("dp2xtp2+sp+zero1", torch.float64)],
        one_in=2,
    ),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_twenty_steps_equal_one_process(name: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    plan = PLANS[name]
    ranks = pool_for(plan, request).run(run_script, plan, dtype)
    assert difference(ranks[0], reference(dtype, plan.get("dp", 1))) <= TOLERANCE[dtype]
    assert len(ranks[0].norms) == 20
    assert all(rank == ranks[0] for rank in ranks), "every rank reports the same numbers, to the bit"


def run_with_stock_scheduler(plan: dict[str, Any]) -> Run:
    with mock.patch.object(PlannedScheduler, "step", _stock_step):
        return run_script(plan, torch.float64)


def _stock_step(self: PlannedScheduler, *args: Any) -> None:
    """Accelerate's own: as many steps as there are processes."""
    self.split_batches = False
    AcceleratedScheduler.step(self, *args)


def test_a_scheduler_that_counts_processes_would_be_caught(pool2: Any) -> None:
    # tp=2 has two processes and one batch a step: the stock scheduler decays twice as fast.
    run = pool2.run(run_with_stock_scheduler, {"tp": 2})[0]
    assert difference(run, reference(torch.float64, 1)) > 1e-2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        crossing("dp2xtp2+sp+zero1", "dp2xtp2+sp+zero1"),
        ("dp2", "dp2xtp2+sp+zero1"),
        nightly("dp2+zero3", "dp2xtp2+sp+zero2"),
        crossing("dp2xtp2+sp+zero2", "dp2xtp2+sp+zero3"),
        nightly("pp2", "tp2"),
        ("dp2", "pp2xdp2+zero1"),
        crossing("pp2xcp2+zero1", "cp2"),
    ],
    ids=[
        "same plan", "on twice the ranks", "from stage 3", "to stage 3", "from pp2", "to pp2", "from pp2 x cp2",
    ],
)  # fmt: skip
def test_resume_goes_on_with_the_same_numbers(
    before: str, after: str, tmp_path: Any, request: pytest.FixtureRequest
) -> None:
    # In the middle of an epoch. The script's own weights are one off, so that what is not loaded would show.
    first, second = PLANS[before], PLANS[after]
    expected = reference(torch.float64, first.get("dp", 1))
    whole = pool_for(first, request).run(run_script, first, torch.float64, save_after=7, directory=tmp_path)[0]
    assert difference(whole, expected) <= 1e-10
    resumed = pool_for(second, request).run(resume_script, second, torch.float64, tmp_path)[0]
    rest = Run(expected.losses[14:], expected.norms[7:], expected.rates[7:])
    assert difference(resumed, rest) <= 1e-10
