"""Meetings of all ranks: calls that every rank must make, and points at which all meet only if one of them wishes it.

Some ranks may make such a call alone, for example a save inside of ``if rank == 0``. The error then names the call, and
says to make it on all ranks. At the points a rank wishes something that all must do together.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from meshwright.faults.referee import WISH

P = ParamSpec("P")
R = TypeVar("R")

EVALUATION = "forward pass in evaluation"
BACKWARD = "gradients"
EPOCH = "beginning of an epoch"
_CALL = re.compile(rf"in ([\w.]+)\(\)|({EVALUATION})|^({BACKWARD}|{EPOCH}),")
# How a rank ended or waits, if that is no consequence of where the program is.
_FAULT = re.compile(r"abruptly|heartbeat|does not answer|Error|Exception|Interrupt|signal")


def on_every_rank(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that every rank must call, whose name is in the messages while a rank waits in it."""

    @functools.wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        from meshwright.faults.guard import active_guard  # the guard's messages use this module

        guard = active_guard()
        if guard is None or guard.trace.call:
            return function(*args, **kwargs)
        guard.trace.call = f"{function.__name__}()"
        try:
            return function(*args, **kwargs)
        finally:
            guard.trace.call = ""

    return named


def advice(said: Mapping[str, str]) -> list[str]:
    """Return what to change if only some ranks are in a call that every rank must make.

    Args:
        said: what each rank does, by the rank's name.

    Example:
        >>> advice({"rank 0 (host a)": "save, in save_checkpoint()", "rank 1 (host a)": "forward pass, step 3"})
        ['rank 0 alone called save_checkpoint(), which every rank must call: take it out of `if rank == 0:`']
        >>> advice({"rank 0 (host a)": "gradients, step 1", "rank 1 (host a)": "forward pass, step 2"})
        ['rank 0 alone called backward(): skip a batch on every rank, or on none']
    """
    if any(_FAULT.search(what) for what in said.values()):
        return []
    calls: dict[str, str | None] = {}
    for name, what in said.items():
        found = _CALL.search(what)
        calls[name] = found and found[found.lastindex or 0]
    if len(set(calls.values())) == 1:
        return []
    lines = []
    for call in dict.fromkeys(call for call in calls.values() if call is not None):
        ranks = ", ".join(name.split(" (")[0] for name, theirs in calls.items() if theirs == call)
        if call == EVALUATION:
            lines.append(f"{ranks} alone evaluated the model: evaluate on every rank, not in `if rank == 0:`")
        elif call == BACKWARD:
            lines.append(f"{ranks} alone called backward(): skip a batch on every rank, or on none")
        elif call == EPOCH:
            lines.append(f"{ranks} alone began to iterate: run each batch on every rank, and skip it on all or none")
        else:
            lines.append(f"{ranks} alone called {call}(), which every rank must call: take it out of `if rank == 0:`")
    return lines


class Wishes:
    """Counts the points at which all ranks do what one of them asked for.

    The program passes them, and the thread that listens to the hub hears of wishes.
    """

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
