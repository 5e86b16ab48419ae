"""Points of a program at which ranks meet only if one of them wishes something that all must do together."""

from __future__ import annotations

import threading

from meshwright.faults.referee import WISH


class Wishes:
    """Counts these points. The program passes them, and the thread that listens to the hub hears of wishes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0  # the points to which the program has come
        self._waits = False  # whether it waits at the last of them
        self._called = 0  # the last point at which another rank is known to have a wish
        self._met = 0  # the last point at which all ranks have met

    def come(self, has_wishes: bool) -> str | None:
        """Record that the program has come to the next point; return the key of a meeting if it must wait there."""
        with self._lock:
            self._count += 1
            self._waits = has_wishes or self._called > self._met
            return f"{WISH}{self._count}" if self._waits else None

    def meet(self) -> None:
        """Record that all ranks have met at the last point."""
        with self._lock:
            self._met = self._count

    def has_passed(self, key: str) -> bool:
        """Record that another rank waits at a point; return whether the program has gone on from there."""
        point = int(key.removeprefix(WISH))
        with self._lock:
            self._called = max(self._called, point)
            return self._count > point or (self._count == point and not self._waits)
