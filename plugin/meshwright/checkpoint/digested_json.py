"""JSON files that hold their own digest: one object, whose first member is the digest of all bytes after it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from meshwright.checkpoint import disk
from meshwright.checkpoint.part_files import digest, reading
from meshwright.errors import CheckpointError

_PREFIX = b'{"digest":"'
_MAX_BYTES = 2**30  # of a file: beyond it, a hostile file would fill the memory


def write_digested(path: Path, name: str, content: dict[str, Any]) -> None:
    """Write a new file, and flush it to the disk.

    Args:
        path: the file, which must not exist.
        name: the name of the object's second member.
        content: its value.
    """
    body = json.dumps(content, indent=1, allow_nan=True).encode() + b"}\n"
    disk.write_file(path, _PREFIX + digest(body).encode() + _middle(name) + body)


def read_digested(path: Path, name: str) -> Any:
    """Read what ``write_digested`` wrote.

    Raises:
        CheckpointError: if the file is missing or damaged.
    """
    with reading(path) as descriptor:
        size = os.fstat(descriptor).st_size
        content = _all_of(descriptor) if size <= _MAX_BYTES else b""
    claimed, rest = content[len(_PREFIX) : len(_PREFIX) + 32], content[len(_PREFIX) + 32 :]
    body = rest.removeprefix(_middle(name))
    if not content.startswith(_PREFIX) or len(body) == len(rest) or digest(body).encode() != claimed:
        raise CheckpointError(f"{path} is damaged: it is not what was saved; load another checkpoint")
    try:
        return json.loads(body.removesuffix(b"}\n"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error


def _middle(name: str) -> bytes:
    return f'","{name}":'.encode()


def _all_of(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 2**20):
        parts.append(part)
    return b"".join(parts)
