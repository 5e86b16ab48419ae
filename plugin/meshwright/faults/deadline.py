"""A deadline at which the kernel ends this process, also if it is stopped or C code holds the GIL.

No thread of Python runs in such a process. So the thread that hears the hub's heartbeats moves the deadline again and
again; the kernel acts if it does not. POSIX timers belong to one process: its children do not inherit them.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading

from meshwright.mesh.siblings import STACK_SIGNAL, WRITES, write_stacks_on_signal

_CLOCK_MONOTONIC = 1  # of <time.h>; it does not jump with the wall clock
_LATER = 1.0  # seconds after which a process that could not exit is killed


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
