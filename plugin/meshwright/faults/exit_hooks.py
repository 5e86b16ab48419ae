"""Tells the guard how the process ends: by an exception, by ``sys.exit``, or normally."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import TracebackType
from typing import NoReturn, Protocol

_ASSERTION = "device-side assert"  # in CUDA's message of a kernel's assertion that does not hold


class Ending(Protocol):
    """The methods of a guard that these hooks call when the process ends."""

    def fail(self, error: BaseException) -> None:
        """Called when the process ends with an exception, which has not been printed yet."""

    def leave_by(self, how: str, error: BaseException | None) -> None:
        """Called when the program calls ``sys.exit`` with an error code, perhaps while it handles an exception."""

    def end_silent(self) -> None:
        """Called when the process ends because of a failure, which it has printed."""

    def close(self, why: str) -> None:
        """Called when the process ends."""

    def forget_in_child(self) -> None:
        """Called in a forked process."""


def install(guard: Callable[[], Ending | None]) -> None:
    """Install the hooks, once per process.

    Args:
        guard: a function that returns the guard in use.
    """
    if getattr(sys.excepthook, "belongs_to_meshwright", False):
        return
    previous, leave = sys.excepthook, sys.exit

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        watching = guard()
        if watching is not None:
            watching.fail(error)
        previous(kind, error, trace)
        if watching is not None:
            watching.end_silent()

    def leave_with(code: str | int | None = None, /) -> NoReturn:
        watching = guard()
        if watching is not None and code not in (None, 0) and threading.current_thread() is threading.main_thread():
            watching.leave_by(f"sys.exit({code!r})", sys.exc_info()[1])
        leave(code)

    report.belongs_to_meshwright = True  # type: ignore[attr-defined]
    sys.excepthook, sys.exit = report, leave_with
    atexit.register(lambda: None if (watching := guard()) is None else watching.close("its program ended"))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            after_in_child=lambda: None if (watching := guard()) is None else watching.forget_in_child()
        )


def end_with_child(guard: Ending) -> Finalize:
    """Tell a guard how its process ends if multiprocessing started it; return the object that does so.

    multiprocessing prints the exception of such a process itself, and calls neither ``sys.excepthook`` nor ``atexit``.
    """

    def finish() -> None:
        error = sys.exc_info()[1]  # the exception that ends the process, if any
        if error is not None and not isinstance(error, SystemExit):
            guard.fail(error)
        guard.close("its program ended")

    return Finalize(None, finish, exitpriority=100)  # before the process waits for its own children


def tell_launcher(error: BaseException) -> None:
    """Write an exception where torch's launchers look for the cause of a failure, unless the program has done so."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or os.path.exists(path):
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    trace = error.__traceback__
    try:
        raise error
    except BaseException as raised:  # the handler writes the traceback of the exception that is being handled
        get_error_handler().record_exception(raised)
    finally:
        error.__traceback__ = trace  # without the frame of this function


def in_short(error: BaseException) -> str:
    """Return the type and message of an exception, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = str(error)
    if _ASSERTION in text:  # which torch follows by advice of several lines that does not name it
        text = f"{text.splitlines()[0]}; this rank has printed what was asserted"
    return f"{type(error).__name__}: {text}{where}"
