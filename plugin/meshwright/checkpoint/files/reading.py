"""Reads a checkpoint's files with their digests, and the numbers that order the checkpoints of one run.

A file that is missing, too short or not an ordinary one raises an error that names it. A JSON file with a digest has
one object, whose first member is the digest of all bytes after it.

No clock decides what is newest. Each save takes a number: one more than the largest among its neighbours, and than that
of the checkpoint that its run has loaded. A run is what one program saves of one model. A program that loads a
checkpoint goes on with its run, until another program has gone on with it: then the next save begins a run of its own.
Only checkpoints of the same run are removed by ``keep``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from meshwright import outside_files
from meshwright.checkpoint.files.place import HeldBytes, Place
from meshwright.checkpoint.files.storage import StoredFile, storage_of
from meshwright.compiling import without_compilation
from meshwright.errors import CheckpointError, RemoteError
from meshwright.outside_files import MEMORY, Check, OddFileError, integer, text

_OF_OTHERS = 2**30  # bytes of memory that a file of another program may take: a Trainer's has all lines of its log
_PREFIX = b'{"digest":"'


@contextlib.contextmanager
def reading(
    path: Place, *, until: int | None = None, follows_links: bool = False, ahead: HeldBytes | None = None
) -> Iterator[StoredFile]:
    """Open a file of a checkpoint, which must be an ordinary file, for reading.

    Args:
        path: the file.
        until: the byte before which the caller will read in order, if it is known.
        follows_links: whether the file may be a link.
        ahead: what earlier readers of the file have left of their last request, and this one leaves, if it is remote.

    Raises:
        CheckpointError: if the file cannot be opened, or the block cannot read it.
        RemoteError: if its store does not answer, so that nothing is known of the file.
    """
    try:
        with storage_of(path).reading(path, until=until, follows_links=follows_links, ahead=ahead) as reader:
            yield reader
    except RemoteError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def read_json(path: Place, *, allowance: int = 0) -> Any:
    """Read a file of JSON, which must be an ordinary file.

    Args:
        path: the file.
        allowance: bytes of memory that the content may take beyond ``MEMORY``.

    Raises:
        CheckpointError: if it cannot be read, is too large, or is not JSON (see ``parse_json``).
    """
    with reading(path) as reader:
        if (size := reader.size) > MEMORY + allowance:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes, which no such file has")
        content = read_exactly(reader, 0, size)
    return parse_json(content, path, allowance=allowance)


def parse_json(content: bytearray, path: Place, *, allowance: int = 0) -> Any:
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


def read_exactly(reader: StoredFile, offset: int, length: int) -> bytearray:
    """Read ``length`` bytes from ``offset`` on.

    Raises:
        CheckpointError: if the file ends earlier.
    """
    content = bytearray(length)
    read_into(reader, offset, memoryview(content))
    return content


def read_into(reader: StoredFile, offset: int, memory: memoryview) -> None:
    """Fill some memory with the bytes from ``offset`` on.

    Raises:
        CheckpointError: if the file ends earlier.
    """
    while len(memory):
        count = reader.read_some(offset, memory)
        if count == 0:
            raise CheckpointError(f"{reader.path} is damaged: it ends at byte {offset}, and more was saved")
        memory, offset = memory[count:], offset + count


def digest(memory: memoryview | bytes | bytearray) -> str:
    """Return the digest of some memory: 128 bits of XXH3, which is faster than a disk and detects accidents."""
    import xxhash  # what writes and reads no checkpoint runs without it

    return xxhash.xxh3_128_hexdigest(memory)


def write_digested(path: Place, name: str, content: dict[str, object]) -> None:
    """Write a file in one step, and flush it to the disk.

    Args:
        path: the file, which must not exist on a disk.
        name: the name of the object's second member.
        content: its value.
    """
    body = json.dumps(content, indent=1, allow_nan=True).encode() + b"}\n"
    storage_of(path).write_file(path, _PREFIX + digest(body).encode() + _middle(name) + body)


def read_start(path: Place, length: int) -> bytes:
    """Return the first bytes of a file, unchecked; none of a file that cannot be read."""
    content = bytearray(length)
    try:
        with reading(path) as reader:
            return bytes(content[: reader.read_some(0, memoryview(content))])
    except CheckpointError:
        return b""


def digest_in(path: Place) -> str:
    """Return the digest that a file of ``write_digested`` holds of its content, unchecked."""
    return read_start(path, len(_PREFIX) + 32)[len(_PREFIX) :].decode(errors="replace")


def is_digested(path: Place) -> bool:
    """Return whether a file begins as ``write_digested`` writes it."""
    return read_start(path, len(_PREFIX)) == _PREFIX


def read_digested(path: Place, name: str, *, allowance: int = 0) -> Any:
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
    with reading(path) as reader:
        size = reader.size
        start = bytes(read_exactly(reader, 0, min(length, size)))
        claimed = start[len(_PREFIX) : len(_PREFIX) + 32]
        # A file of another form is not read, however large it is.
        is_ours = start == _PREFIX + claimed + middle and length < size <= MEMORY + allowance
        body = read_exactly(reader, length, size - length) if is_ours else bytearray()
    if not is_ours or digest(body).encode() != claimed or not body.endswith(b"}\n"):
        raise CheckpointError(f"{path} is damaged: it is not what was saved; load another checkpoint")
    del body[-2:]
    return parse_json(body, path, allowance=allowance)


def _middle(name: str) -> bytes:
    return f'","{name}":'.encode()


MAX_NUMBER = 2**40  # of a save; no folder has as many
# Of files that older versions wrote: they have no number, and one run for all of them.
UNNUMBERED, UNNAMED = 0, ""
LAST_TIME = 4_102_444_800 * 10**9  # the end of 2099, in nanoseconds since 1970

FIELDS: dict[str, Check] = {"number": integer(1, MAX_NUMBER), "run": text("[0-9a-f]{32}|")}

_START = 512  # bytes of a file that have the fields, since they are written first
_NUMBER = re.compile(rb'"number": ([0-9]{1,13}),')
_RUN = re.compile(rb'"run": "([0-9a-f]{32})?"')


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The number and the run of a checkpoint, read without checking the file's digest; (0, "") of an older version."""

    number: int = UNNUMBERED
    run: str = UNNAMED

    @staticmethod
    def of(path: Place) -> Mark:
        """Read the first bytes of a manifest or a seal, so that a large or hostile neighbour costs nothing."""
        start = read_start(path, _START)
        number, run = _NUMBER.search(start), _RUN.search(start)
        if number is None or run is None:
            return Mark()
        return Mark(number=int(number[1]), run=(run[1] or b"").decode())


class Lineage:
    """The run that a model's next checkpoint belongs to."""

    def __init__(self) -> None:
        self.run = uuid.uuid4().hex
        self.last = UNNUMBERED  # the largest number of this run that this program has taken or loaded

    @staticmethod
    def of(model: nn.Module) -> Lineage:
        """Return the lineage of a model, compiled or not."""
        return _OF_MODELS.setdefault(without_compilation(model), Lineage())

    def go_on_from(self, mark: Mark) -> None:
        """Go on with the run of a checkpoint that was loaded."""
        self.run, self.last = mark.run, mark.number

    def next(self, target: Place, neighbours: Iterable[Place]) -> Mark:
        """Return the mark of a new checkpoint; the folder must be locked.

        Args:
            target: its manifest or seal, which may exist, and which was passed to :func:`begin_save`.
            neighbours: the manifests or seals of the checkpoints in the folder.

        Raises:
            CheckpointError: if a neighbour has the largest number that there is, or another program has saved to the
                same folder since this one began to save to it.
        """
        present, seen = Mark.of(target), _SEEN.get(target, Mark())
        if present.number > seen.number and present.run not in (seen.run, self.run):
            folder = target.parent
            raise CheckpointError(
                f"another program has saved to {folder} since this one began to save there, and its checkpoint stays. "
                f"Give each program a folder of its own, such as {folder.with_name(folder.name + '-2')}"
            )
        marks = {path: Mark.of(path) for path in neighbours}
        for path, mark in marks.items():
            if mark.number >= MAX_NUMBER:
                raise CheckpointError(
                    f"{path} has the number {mark.number}, after which no checkpoint can come: it is damaged or "
                    "forged. Move its folder away, and save again"
                )
        if any(mark.run == self.run and mark.number > self.last for mark in marks.values()):
            self.run = uuid.uuid4().hex  # another program goes on with the run, or this one went back in it
        self.last = max(self.last, *(mark.number for mark in marks.values()), UNNUMBERED) + 1
        _SEEN[target] = Mark(number=self.last, run=self.run)
        return _SEEN[target]


def begin_save(target: Place) -> None:
    """Remember whose checkpoint a folder has when this program begins to save to it.

    Args:
        target: the manifest or seal, which need not exist.
    """
    _SEEN.setdefault(target, Mark.of(target))


# What this program has last seen in the folders that it saves to. It may replace that, and no other program's.
_SEEN: dict[Place, Mark] = {}

# By model, since a program may save several below one folder. Not an attribute: models are copied and pickled.
_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, Lineage] = weakref.WeakKeyDictionary()
