"""The file operations of a save, each one step that a crash can separate from the next, and the error of a full disk,
which names the folder and the bytes.

All that a save changes on disk goes through these functions, so that the tests can fail or kill the process at each.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshwright.checkpoint.files.place import Place

_SYNC = 256 * 2**20  # bytes written between two flushes


def make_folder(path: Path) -> None:
    """Create a folder and its parents, if they do not exist."""
    path.mkdir(parents=True, exist_ok=True)


def create(path: Path) -> int:
    """Create a file, which must not exist, and return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def write(descriptor: int, memory: memoryview | bytes) -> None:
    """Write all of some memory to a file."""
    rest = memoryview(memory)
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]


def sync(descriptor: int) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Flush a file that another program has written to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


class NewFile:
    """A file that must not exist; it is flushed to the disk when it is closed, and on the way if it is large.

    On a slow disk, one flush at the end would take minutes, for which other ranks wait.
    """

    def __init__(self, path: Path):
        self._file = io.FileIO(create(path), "w")  # which closes itself if a failed save forgets it
        self._unsynced = 0

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, memory: memoryview | bytes) -> None:
        """Append all of some memory."""
        write(self._file.fileno(), memory)
        self._unsynced += len(memory)
        if self._unsynced >= _SYNC:
            sync(self._file.fileno())
            self._unsynced = 0

    def close(self) -> None:
        """Flush the file and close it."""
        with self._file:
            sync(self._file.fileno())


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk."""
    with NewFile(path) as file:
        file.write(content)


def replace_file(path: Path, write_to: Callable[[Path], None]) -> None:
    """Replace a file in one step, or create it.

    Args:
        path: the file.
        write_to: function that writes a new file to the path that it is given, and flushes it.
    """
    staged = path.with_name(f".{path.name}.new")
    staged.unlink(missing_ok=True)  # left by a process that was killed
    try:
        write_to(staged)
        rename(staged, path)
    except OSError:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
        raise


def rename(source: Path, target: Path) -> None:
    """Rename a file or a folder in one step. A file replaces ``target``; a folder's ``target`` must not exist."""
    os.rename(source, target)


def remove(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def remove_folder(path: Path) -> None:
    """Remove a folder with all that is in it; another job may remove it at the same time."""
    shutil.rmtree(path, onerror=_unless_gone)


def _unless_gone(_: Any, __: str, failure: Any) -> None:
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def naming_the_disk(target: Place, needed: int = 0) -> Iterator[None]:
    """Name the folder in the error of a full disk that is raised in this context.

    Args:
        target: the folder or file that is saved.
        needed: bytes that this rank writes; 0 if it is not known.

    Raises:
        OSError: with the number of the error that the disk has given.

    Example::

        with naming_the_disk(Path("runs/step-100"), needed=part.num_bytes):
            part.write(path)
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or error.errno is None:
            raise
        needs, free = f"this rank needs {needed:,} bytes, and " if needed else "", _free(Path(target))
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)}: {needs}{free} are free in {target.parent}. What was saved there "
            f"before is whole. Free space, or save to another disk",
            str(target),
        ) from error


def _free(target: Path) -> str:
    for folder in (target, *target.absolute().parents):
        with contextlib.suppress(OSError):
            return f"{shutil.disk_usage(folder).free:,} bytes"
    return "an unknown number of bytes"
