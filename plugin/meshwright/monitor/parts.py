"""The time of a step by part, measured where the parts begin."""

from __future__ import annotations

import time
from typing import Any

import torch

from meshwright.monitor.figures import PARTS


class HostParts:
    """Adds up the host's seconds in each part; this is the time of the part on CPU, where operations are synchronous."""

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
    """Records events on the device where the parts of one step per interval begin; nobody waits for them."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Any]] = []
        self._last: list[tuple[str, Any]] = []

    def begin(self, part: str, *, is_sampled: bool) -> None:
        """Begin another part; it is recorded if the step is sampled."""
        if is_sampled:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((part, event))

    def take(self, steps: int) -> dict[str, float]:
        """Return the seconds of each part in the sampled step before, whose events have passed by now."""
        sums = dict.fromkeys(PARTS, 0.0)
        if self._last and self._last[-1][1].query():
            for (part, event), (_, following) in zip(self._last, self._last[1:], strict=False):
                sums[part] += 1e-3 * event.elapsed_time(following)
        self._last, self._events = self._events, []
        return sums
