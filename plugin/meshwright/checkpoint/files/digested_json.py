"""JSON files that hold their own digest: one object, whose first member is the digest of all bytes after it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from meshwright.checkpoint.files import disk
from meshwright.checkpoint.files.reading import parse_json, read_exactly, reading
from meshwright.errors import CheckpointError
from meshwright.outside_files import MEMORY

_PREFIX = b'{"digest":"'


def digest(memory: memoryview | bytes | bytearray) -> str:
    """Return the digest of some memory: 128 bits of XXH3, which is faster than a disk and detects accidents."""
    import xxhash  # what writes and reads no checkpoint runs without it

    return xxhash.xxh3_128_hexdigest(memory)


def write_digested(path: Path, name: str, content: dict[str, object]) -> None:
    """Write a new file, and flush it to the disk.

    Args:
        path: the file, which must not exist.
        name: the name of the object's second member.
        content: its value.
    """
    body = json.dumps(content, indent=1, allow_nan=True).encode() + b"}\n"
    disk.write_file(path, _PREFIX + digest(body).encode() + _middle(name) + body)


def read_start(path: Path, length: int) -> bytes:
    """Return the first bytes of a file, unchecked; none of a file that cannot be read."""
    try:
        with reading(path) as descriptor:
            return os.pread(descriptor, length, 0)
    except CheckpointError:
        return b""


def digest_in(path: Path) -> str:
    """Return the digest that a file of ``write_digested`` holds of its content, unchecked."""
    return read_start(path, len(_PREFIX) + 32)[len(_PREFIX) :].decode(errors="replace")


def read_digested(path: Path, name: str, *, allowance: int = 0) -> Any:
    """Read what ``write_digested`` wrote.

    Args:
        path: the file.
        name: the name of the object's second member.
        allowance: bytes of memory that the content may take beyond ``MEMORY``.

    Raises:
        CheckpointError: if the file is missing or damaged.
    """
    middle = _middle(name)
    length = len(_PREFIX) + 32 + len(middle)
    with reading(path) as descriptor:
        size = os.fstat(descriptor).st_size
        start = os.pread(descriptor, length, 0)
        claimed = start[len(_PREFIX) : len(_PREFIX) + 32]
        # A file of another form is not read, however large it is.
        is_ours = start == _PREFIX + claimed + middle and length < size <= MEMORY + allowance
        body = read_exactly(descriptor, path, length, size - length) if is_ours else bytearray()
    if not is_ours or digest(body).encode() != claimed or not body.endswith(b"}\n"):
        raise CheckpointError(f"{path} is damaged: it is not what was saved; load another checkpoint")
    del body[-2:]
    return parse_json(body, path, allowance=allowance)


def _middle(name: str) -> bytes:
    return f'","{name}":'.encode()
