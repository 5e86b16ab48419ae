"""The end of this process: how it is noticed and told to the guard, and how it is forced by a deadline.

The guard is told how the process ends: by an exception, by ``sys.exit``, or normally.

At a deadline the kernel ends the process, also if it is stopped or C code holds the GIL. No thread of Python runs in
such a process. So the thread that hears the hub's heartbeats moves the deadline again and again; the kernel acts if it
does not. POSIX timers belong to one process: its children do not inherit them.

After an error of the guard the ranks are at different places, so the next call into Meshwright ends the process. After
an error of this rank's own forward pass the others may wait for it in this pass; only what follows shows whether all
ranks have raised it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

from meshwright.errors import PACKAGES, DivergenceError, PeerFailedError, PlanError
from meshwright.mesh.siblings import STACK_SIGNAL, WRITES, write_stacks_on_signal
from meshwright.printable import tell

_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
_PLUGIN = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_PACKAGES = tuple(os.path.join(_PLUGIN, package, "") for package in PACKAGES)
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
        while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, *_PACKAGES, "<")):
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


_ASSERTION = "device-side assert"  # in CUDA's message of a kernel's assertion that does not hold

_CLOCK_MONOTONIC = 1  # of <time.h>; it does not jump with the wall clock
_LATER = 1.0  # seconds after which a process that could not exit is killed


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


class _SignalEvent(ctypes.Structure):
    """``struct sigevent`` of Linux: send the signal ``number`` to the process."""

    _fields_ = (("value", ctypes.c_void_p), ("number", ctypes.c_int), ("kind", ctypes.c_int), ("_", ctypes.c_char * 48))


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec``: the interval, and the time until the timer expires; 0 for never."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "seconds", "nanoseconds"))


class Deadline:
    """Ends this process by SIGKILL after a time, unless it is moved; the stacks of its threads are written before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_final = False
        self._timers: list[tuple[ctypes.c_void_p, float]] = []  # each with the seconds by which it is early
        if sys.platform != "linux":
            return
        self._libc = ctypes.CDLL(None)
        self._add(signal.SIGKILL)
        if write_stacks_on_signal():
            self._add(STACK_SIGNAL, early=WRITES)

    def set(self, seconds: float | None) -> None:
        """Move the deadline to ``seconds`` from now; with None, let the process live."""
        with self._lock:
            if not self._is_final:
                self._move(seconds)

    def end(self, seconds: float | None) -> None:
        """Set the deadline for the last time: what a thread does later has no effect, such as on a late heartbeat.

        The process exits with code 1 at this deadline, since it has failed and has said why; what it waits for is often
        a backend's thread, which waits for a rank that is gone.
        """
        with self._lock:
            if self._is_final:
                return
            self._is_final = True
            self._move(None)
            if seconds is not None and self._timers:
                # The handler of a signal gets its number, so C's _exit makes it the exit code: that of SIGHUP is 1.
                self._libc.signal(signal.SIGHUP, self._libc._exit)
                self._add(signal.SIGHUP, early=_LATER)
                self._move(seconds + _LATER)
            else:
                for timer, _ in self._timers:
                    self._libc.timer_delete(timer)

    def _add(self, number: int, *, early: float = 0.0) -> None:
        timer = ctypes.c_void_p()
        event = _SignalEvent(None, number, 0, b"")
        with contextlib.suppress(AttributeError):  # before glibc 2.34
            if not self._libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
                self._timers.append((timer, early))

    def _move(self, seconds: float | None) -> None:
        for timer, early in self._timers:
            at = 0.0 if seconds is None else max(seconds - early, 0.001)
            spec = _TimerSpec(0, 0, int(at), int(at % 1 * 1e9))
            self._libc.timer_settime(timer, 0, ctypes.byref(spec), None)


Error = TypeVar("Error", bound=RuntimeError)


class CaughtErrors:
    """The errors of one rank after which its program may have gone on.

    Attributes:
        of_pass: what the program has caught of its last forward pass, for messages; empty once the ranks agree again.
    """

    def __init__(self) -> None:
        self._first: RuntimeError | None = None
        self.of_pass = ""

    def keep(self, error: Error) -> Error:
        """Remember an error after which the ranks cannot go on together, and return it."""
        self._first = self._first or error
        return error

    def swallowed(self) -> RuntimeError | None:
        """Return the first error of the group, if the program has caught it and gone on.

        Raises:
            RuntimeError: this error, while the program still handles it, as in a ``finally``.
        """
        if self._first is None or threading.current_thread() is not threading.main_thread():
            return None
        if sys.exc_info()[1] is not None:
            raise self._first
        return self._first

    def see_pass(self, error: BaseException | None, step: int) -> bool:
        """Take the error that ends a forward pass; return whether it is one of the program."""
        if error is None or isinstance(error, DivergenceError | PeerFailedError | PlanError):
            return False
        self.of_pass = (
            f"its program caught {in_short(error)}, which the forward pass of step {step} at {place()} "
            "raised, and went on: skip a batch on every rank or on none"
        )
        return True


def text_of(error: RuntimeError) -> str:
    """Return what a process says that ends because its program has caught an error of the group."""
    return (
        f"the program caught {type(error).__name__} and went on, but the ranks are no longer at the same place, so "
        "nothing that they compute together would be right. Let this error end the program: catch the classes that "
        f"you expect instead of RuntimeError or Exception. It was:\n{error}"
    )


SPEAKS = 1.0  # seconds in which the process can print; its program may hold the lock of the stream
MARGIN = 0.5  # seconds for the rest


def end_process(
    text: str, deadline: Deadline, last: Callable[[], None], error: BaseException | None = None
) -> NoReturn:
    """End this process with exit code 1.

    Args:
        text: what to print; empty for nothing.
        deadline: this process's deadline, for the case that a part of its end hangs too.
        last: a function to call after the text was printed.
        error: the cause, for launchers that show it.
    """
    deadline.set(SPEAKS + MARGIN)

    def speak() -> None:
        if text:
            tell(text)
        if error is not None:
            tell_launcher(error)
        sys.stdout.flush()

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    speaker.join(SPEAKS)
    last()
    end_children()
    os._exit(1)


def end_children() -> None:
    """Kill this process's daemons, such as a loader's workers: a stopped one would live on, or be waited for."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
