"""Names a call that some ranks make alone, such as a save inside of ``if rank == 0``, and says to make it on all."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

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
