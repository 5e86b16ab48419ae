"""The file operations of saving, each one step that a crash can separate from the next.

All that a save changes on disk goes through these functions, so that the tests can fail or kill the process at each.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any


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


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk."""
    descriptor = create(path)
    try:
        write(descriptor, content)
        sync(descriptor)
    finally:
        os.close(descriptor)


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
