"""A disk that fails, or whose process is killed, at one of the steps of a save.

Every change of the disk that Python makes on this thread is a step: creating, writing (also half of it), syncing,
renaming and removing, and each file that torch.save or safetensors writes. A kill is simulated: from its step on
nothing reaches the disk, what was not synced is cut, and locks are released, which is what a killed process leaves;
tests with real kills compare.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import io
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import safetensors.torch
import torch


class Killed(BaseException):
    """Stands for the end of the process."""


class KilledRank(OSError):
    """Stands for the end of one process of several, in a test whose process lives on.

    The other ranks get an error too, as they do when a process has ended. No other operation of this rank reaches the
    disk.
    """


class FaultyDisk:
    """Counts the steps of a program, and makes one of them fail.

    Args:
        step: the step that fails; None only counts.
        kind: ``"kill"``, or ``"full"`` for a disk without space from that step on (until a file is removed).
        killed: the exception of a kill.
        synced: a file in which all ranks note what they have synced; None if only this rank syncs its files.
    """

    def __init__(
        self,
        step: int | None = None,
        kind: str = "kill",
        killed: type[BaseException] = Killed,
        synced: str | os.PathLike[str] | None = None,
    ):
        self.step, self.kind, self.killed, self.synced = step, kind, killed, synced
        self.steps = 0
        self.log: list[str] = []
        self._dead = False
        self._thread = threading.get_ident()
        self._real_open = builtins.open
        self._unsynced: dict[tuple[int, int], int] = {}  # by device and inode, a descriptor that stays open
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

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or not set(mode) & set("wax+") or isinstance(file, int):
                return real_open(file, mode, *args, **kwargs)
            self._count("open", (file,))
            result = real_open(file, mode, *args, **kwargs)
            self._follow("open", (file,), result.fileno())
            return result

        def whole(write: Callable[..., Any], name: str) -> Callable[..., Any]:
            def call(content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
                if not isinstance(path, str | os.PathLike):
                    return write(content, path, *args, **kwargs)
                self._count(name, (path,))
                write(content, path, *args, **kwargs)
                descriptor = real["open"](path, os.O_RDWR)
                self._follow("open", (path,), descriptor)
                os.close(descriptor)

            return call

        real_open = self._real_open

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
            for module in (builtins, io):
                stack.enter_context(mock.patch.object(module, "open", opened))
            for module, name in ((torch, "save"), (safetensors.torch, "serialize_file")):
                stack.enter_context(mock.patch.object(module, name, whole(getattr(module, name), name)))
            try:
                yield self
            finally:
                if self._dead and self.kind == "kill":
                    for descriptor in self._locked:
                        with contextlib.suppress(OSError):
                            real_lock(descriptor, fcntl.LOCK_UN)
                for descriptor in self._unsynced.values():
                    os.close(descriptor)
                self._unsynced.clear()

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
                synced = self._synced_by_all()
                for identity, descriptor in self._unsynced.items():
                    if identity not in synced:
                        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            self._fail()

    def _fail(self) -> None:
        if self.kind == "kill":
            raise self.killed
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _follow(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "open":
            self._unsynced.setdefault(_identity(result), os.dup(result))
        elif name == "fsync":
            self._note_synced(_identity(args[0]))
            if (descriptor := self._unsynced.pop(_identity(args[0]), None)) is not None:
                os.close(descriptor)

    def _note_synced(self, identity: tuple[int, int]) -> None:
        if self.synced is not None:
            with self._real_open(self.synced, "a") as file:
                file.write(f"{identity[0]} {identity[1]}\n")

    def _synced_by_all(self) -> set[tuple[int, int]]:
        if self.synced is None or not os.path.exists(self.synced):
            return set()
        with self._real_open(self.synced) as file:
            return {(int(device), int(inode)) for device, inode in map(str.split, file)}


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
