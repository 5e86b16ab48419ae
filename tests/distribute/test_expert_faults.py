"""Each planted fault of a model with experts is found by a comparison with one process.

1e-10 as for models without a fault: where a fault does not show, only the order of sums differs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.exact import relative_difference
from support.parity import TOLERANCE
from support.planted_experts import FAULTS, train


@pytest.mark.crossing
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, pool2: Any) -> None:
    fault, expected = FAULTS[name], train(name, is_planted=False)
    actual = pool2.run(train, name, is_planted=True)[0]
    found = {key: relative_difference(actual[key], x) if key in actual else torch.inf for key, x in expected.items()}
    assert found[fault.shows] > 1e-5
    assert not fault.unseen or found[fault.unseen] <= TOLERANCE
