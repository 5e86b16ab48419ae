"""Tells where the program's main thread is, for a thread beside it."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_COLLECTIVES = os.path.join(os.path.dirname(__file__), "interpose.py")
_DEPTH = 8  # frames of sockets and locks that a wait has at most

_Function = TypeVar("_Function", bound=Callable[..., Any])
_waits: set[CodeType] = set()


def waits_for_ranks(function: _Function) -> _Function:
    """Mark a function as one that waits for other ranks, and runs no code of the program meanwhile."""
    _waits.add(function.__code__)
    return function


def place(thread: threading.Thread | None = None) -> str:
    """Return the line of the program at which a thread is; the innermost line if all are a library's.

    Args:
        thread: the thread; None for the main thread.
    """
    frame = innermost = found = _frame(thread)
    try:
        while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, _PACKAGE, "<")):
            frame = frame.f_back
        found = frame or innermost
        return "" if found is None else f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}"
    finally:
        del frame, innermost, found  # in the thread itself, a circle that would keep the locals of all callers


def is_waiting() -> bool:
    """Return whether the main thread waits for other ranks, in a collective or in a function marked as such."""
    frame = _frame()
    if frame is None:
        return False
    # The backend's call has no frame of its own, so the innermost frame is that of the call's wrapper, or torch's.
    file = frame.f_code.co_filename
    if file == _COLLECTIVES or f"{os.sep}torch{os.sep}distributed{os.sep}" in file:
        return True
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code in _waits:
            return True
        frame = frame.f_back
    return False


def stack() -> str:
    """Return the main thread's stack, as a traceback prints it."""
    frame = _frame()
    return "" if frame is None else "".join(traceback.format_stack(frame))


def _frame(thread: threading.Thread | None = None) -> FrameType | None:
    return sys._current_frames().get((thread or threading.main_thread()).ident or 0)
