"""gloo gives up when the guard does; NCCL's watchdog later, and never earlier than the program has said."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.faults.collective_log import WATCHDOG_WAITS, set_timeout


class Backend:
    """Stands in for a backend, since NCCL needs GPUs."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.options = lambda: name, SimpleNamespace(_timeout=datetime.timedelta(seconds=seconds))

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        self.options._timeout = timeout


def group_of(**backends: Backend) -> Any:
    return SimpleNamespace(
        _device_types=[torch.device(kind) for kind in backends], _get_backend=lambda device: backends[device.type]
    )


@pytest.mark.parametrize(("before", "after"), [(120.0, 120.0 + WATCHDOG_WAITS), (600.0, 600.0)])
def test_the_watchdog_is_later_than_the_guard(before: float, after: float) -> None:
    gloo, nccl = Backend("gloo", 1800.0), Backend("nccl", before)
    set_timeout(group_of(cpu=gloo, cuda=nccl), 120.0)
    assert gloo.options._timeout.total_seconds() == 120.0
    assert nccl.options._timeout.total_seconds() == after
