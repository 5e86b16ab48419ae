"""A disk that fails, or whose process is killed, at one of the steps of a save.

Every change of the disk that Python makes on this thread is a step: creating, writing (also half of it), syncing,
renaming and removing. A kill is simulated: from its step on nothing reaches the disk, what was not synced is cut, and
locks are released, which is what a killed process leaves; tests with real kills compare.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


class Killed(BaseException):
    """Stands for the end of the process."""


class FaultyDisk:
    """Counts the steps of a program, and makes one of them fail.

    Args:
        step: the step that fails; None only counts.
        kind: ``"kill"``, or ``"full"`` for a disk without space from that step on (until a file is removed).
    """

    def __init__(self, step: int | None = None, kind: str = "kill"):
        self.step, self.kind = step, kind
        self.steps = 0
        self.log: list[str] = []
        self._dead = False
        self._thread = threading.get_ident()
        self._unsynced: dict[int, str] = {}
        self._locked: list[int] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[FaultyDisk]:
        """Let the steps inside count."""
        names = ("open", "write", "fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir")
        real = {name: getattr(os, name) for name in names}
        real_lock, real_close = fcntl.flock, os.close

        def patched(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                is_change = name != "open" or args[1] & (os.O_CREAT | os.O_TRUNC)
                if threading.get_ident() != self._thread or not is_change:
                    return real[name](*args, **kwargs)
                self._count(name, args)
                result = real[name](*args, **kwargs)
                self._follow(name, args, result)
                return result

            return call

        def lock(descriptor: int, operation: int) -> None:
            real_lock(descriptor, operation)
            self._locked.append(descriptor)

        def close(descriptor: int) -> None:
            real_close(descriptor)
            if descriptor in self._locked:
                self._locked.remove(descriptor)

        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(mock.patch.object(os, name, patched(name)))
            stack.enter_context(mock.patch.object(fcntl, "flock", lock))
            stack.enter_context(mock.patch.object(os, "close", close))
            try:
                yield self
            finally:
                if self._dead and self.kind == "kill":
                    for descriptor in self._locked:
                        real_close(descriptor)

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        self.steps += 1
        self.log.append(f"{name} {args[0]}")
        removes = name in ("unlink", "remove", "rmdir")
        if self._dead and not (self.kind == "full" and (removes or name in ("rename", "replace"))):
            self._fail()
        if self.steps - 1 == self.step and not (self.kind == "full" and removes):
            if name == "write":  # half of it reaches the disk
                data = memoryview(args[1]).cast("B")
                os.pwrite(args[0], data[: len(data) // 2], os.lseek(args[0], 0, os.SEEK_CUR))
            self._dead = True
            if self.kind == "kill":
                for path in self._unsynced.values():
                    with contextlib.suppress(OSError):
                        os.truncate(path, os.stat(path).st_size // 2)
            self._fail()

    def _fail(self) -> None:
        if self.kind == "kill":
            raise Killed
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _follow(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "open":
            self._unsynced[result] = os.path.abspath(args[0])
        elif name == "fsync":
            self._unsynced.pop(args[0], None)
