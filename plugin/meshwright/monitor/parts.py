"""The time of a step by part, measured where the parts begin."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from meshwright.monitor.figures import PARTS


class HostParts:
    """Adds up the host's seconds in each part; on CPU, operations end before the host goes on."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(PARTS, 0.0)
        self._part, self._since = "between", time.perf_counter()

    def begin(self, part: str, *, is_sampled: bool) -> None:
        """End the running part, and begin another one."""
        now = time.perf_counter()
        self._sums[self._part] += now - self._since
        self._part, self._since = part, now

    def take(self, steps: int) -> dict[str, float]:
        """Return the seconds of each part per step, and begin anew."""
        found = {name: value / steps for name, value in self._sums.items()}
        self._sums = dict.fromkeys(PARTS, 0.0)
        return found


class CudaParts:
    """Records events on the device where the parts of sampled steps begin; nobody waits for them.

    What lies between the steps is not recorded.
    """

    def __init__(self) -> None:
        self._running: list[tuple[str, Any]] = []
        self._ended: list[list[tuple[str, Any]]] = []

    def begin(self, part: str, *, is_sampled: bool) -> None:
        """Begin another part; it is recorded if the step is sampled."""
        if not is_sampled:
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._running.append((part, event))
        if part == "between":
            self._ended, self._running = [*self._ended[-1:], self._running], []

    def take(self, steps: int) -> dict[str, float]:
        """Return the seconds of each part in the newest sampled step that the device has finished."""
        sums = dict.fromkeys(PARTS, 0.0)
        done = [events for events in self._ended if events[-1][1].query()]
        for (part, event), (_, following) in itertools.pairwise(done[-1] if done else []):
            sums[part] += 1e-3 * event.elapsed_time(following)
        return sums
