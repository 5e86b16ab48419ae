"""Values that ranks send to rank 0 without waiting for an answer."""

from __future__ import annotations

import threading
from typing import Any

_KEPT = 64  # topics that wait to be taken; more mean that nobody takes them


class Posted:
    """Collects values by topic and rank; the hub adds, and another thread of rank 0 takes.

    Args:
        world_size: the number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._changed = threading.Condition()
        self._values: dict[str, dict[int, Any]] = {}

    def add(self, rank: int, *, topic: str, value: object) -> None:
        """Add a rank's value."""
        with self._changed:
            self._values.setdefault(topic, {})[rank] = value
            while len(self._values) > _KEPT:
                del self._values[next(iter(self._values))]
            self._changed.notify_all()

    def take(self, topic: str, patience: float) -> dict[int, Any]:
        """Return the values of a topic by rank, when all ranks have added theirs or the patience has ended."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._values.get(topic, ())) == self._world_size, timeout=patience)
            return self._values.pop(topic, {})
