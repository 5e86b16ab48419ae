"""Reads a checkpoint's files. One that is missing, too short or not an ordinary file raises an error that names it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright import outside_files
from meshwright.errors import CheckpointError
from meshwright.outside_files import MEMORY, OddFileError

_OF_OTHERS = 2**30  # bytes of memory that a file of another program may take: a Trainer's has all lines of its log


@contextlib.contextmanager
def reading(path: Path) -> Iterator[int]:
    """Open a file of a checkpoint, which must be an ordinary file, for reading."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    try:
        yield descriptor
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def read_json(path: Path, *, allowance: int = 0) -> Any:
    """Read a file of JSON, which must be an ordinary file.

    Args:
        path: the file.
        allowance: bytes of memory that the content may take beyond ``MEMORY``.

    Raises:
        CheckpointError: if it cannot be read, is too large, or is not JSON (see ``parse_json``).
    """
    with reading(path) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path} is not an ordinary file")
        if (size := os.fstat(descriptor).st_size) > MEMORY + allowance:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes, which no such file has")
        content = read_exactly(descriptor, path, 0, size)
    return parse_json(content, path, allowance=allowance)


def parse_json(content: bytearray, path: Path, *, allowance: int = 0) -> Any:
    """Return the value of a JSON text of a checkpoint's file, as ``outside_files.parse_json`` does.

    Raises:
        CheckpointError: if it is not JSON of a checkpoint.
    """
    try:
        return outside_files.parse_json(content, allowance=allowance)
    except OddFileError as error:
        raise CheckpointError(f"{path} is damaged: {error}; load another checkpoint") from error


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file of another program, which may be a link; an empty one if there is none."""
    try:
        found = read_json(Path(os.path.realpath(path)), allowance=_OF_OTHERS)
    except CheckpointError:
        return {}
    return found if isinstance(found, dict) else {}


def first_of(fields: dict[str, Any], name: str) -> Any:
    """Return the first item of a list among the fields of such a file; None if there is none."""
    found = fields.get(name)
    return found[0] if isinstance(found, list) and found else None


def read_exactly(descriptor: int, path: Path, offset: int, length: int) -> bytearray:
    """Read ``length`` bytes from ``offset`` on.

    Raises:
        CheckpointError: if the file ends earlier.
    """
    content = bytearray(length)
    read_into(descriptor, path, offset, memoryview(content))
    return content


def read_into(descriptor: int, path: Path, offset: int, memory: memoryview) -> None:
    """Fill some memory with the bytes from ``offset`` on.

    Raises:
        CheckpointError: if the file ends earlier.
    """
    while len(memory):
        count = os.preadv(descriptor, [memory], offset)
        if count == 0:
            raise CheckpointError(f"{path} is damaged: it ends at byte {offset}, and more was saved")
        memory, offset = memory[count:], offset + count
