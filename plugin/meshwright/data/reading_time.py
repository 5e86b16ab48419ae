"""The time for which a program waits for its data, which the lines of a run show."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TypeVar

from meshwright.faults import interpose

_T = TypeVar("_T")


class _ReadingState(threading.local):
    seconds = 0.0


_state = _ReadingState()


def waited_for_data() -> float:
    """Return the seconds that this thread has waited for data, without those in which it waited for other ranks."""
    return _state.seconds


def timed(items: Iterator[_T]) -> Iterator[_T]:
    """Yield the items, and count the time until each of them is there."""
    while True:
        begun, waited = time.perf_counter(), interpose.waited()
        try:
            item = next(items)
        except StopIteration:
            return
        finally:
            _state.seconds += max(0.0, time.perf_counter() - begun - (interpose.waited() - waited))
        yield item
