"""Each planted fault of a model with experts is found by a comparison with one process.

1e-10 as for models without a fault: where a fault does not show, only the order of sums differs.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import meshwright as mw
from harness.programs import mark_fault, run_program
from meshwright.parallel.experts.token_dispatchers import ExpertDispatch
from support.anatomies import build, collate, samples
from support.ending import TIMEOUT, check
from support.exact import relative_difference
from support.parity import TOLERANCE
from support.planted_experts import FAULTS, train


@pytest.mark.crossing
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, pool2: Any) -> None:
    fault, expected = FAULTS[name], train(name, is_planted=False)
    if name == "recomputation routes again":  # which the comparison of recomputed layers finds in the first step
        kind, said = pool2.run_expecting_error(train, name, is_planted=True)[0]
        assert kind == "PlanError" and "computes something else when recompute='full'" in said
        return
    actual = pool2.run(train, name, is_planted=True)[0]
    found = {key: relative_difference(actual[key], x) if key in actual else torch.inf for key, x in expected.items()}
    assert found[fault.shows] > 1e-5
    assert not fault.unseen or found[fault.unseen] <= TOLERANCE


def not_connected() -> None:
    """A rank without tokens returns nothing that its experts have computed, and so sends no gradients in backward."""
    run = ExpertDispatch._run

    def idle(self: ExpertDispatch, rows: Tensor, *args: Any, **options: Any) -> Tensor:
        return run(self, rows, *args, **options) if len(rows) else rows.detach()

    name = "mixtral, idle experts"
    model = mw.to_distributed(build(name), config=mw.ToDistributedConfig(plan="dp2 ep2", timeout_s=TIMEOUT))[0]
    mark_fault()
    with mock.patch.object(ExpertDispatch, "_run", idle):
        model(**collate(samples(name, 2))).loss.backward()
        mw.clip_grad_norm_(model, 1.0)
    print("went on in silence", flush=True)


@pytest.mark.crossing
def test_an_idle_rank_that_is_not_connected_is_named() -> None:
    for outcome in run_program(not_connected, 2):
        check(outcome, r"rank", within=TIMEOUT + 5)
