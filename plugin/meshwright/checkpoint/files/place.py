"""Where a checkpoint is, at a path of the local disk or at a URL, and whether all ranks see the same files there.

Also what the last request for a remote file has brought beyond what was asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from meshwright.errors import CheckpointError
from meshwright.faults.together import exchange_together

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*", re.IGNORECASE)
_LOCAL = ("file", "local")  # the schemes that fsspec has for the local disk


class Url(str):
    """The URL of a folder or a file in a store, with the part of ``Path`` that code uses of both.

    Example:
        >>> Url("s3://bucket/run") / "step-100"
        's3://bucket/run/step-100'
    """

    __slots__ = ()

    @property
    def scheme(self) -> str:
        return self.partition("://")[0]

    @property
    def name(self) -> str:
        return self.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        return Url(f"{self.scheme}://{self.partition('://')[2].rpartition('/')[0]}")

    def with_name(self, name: str) -> Url:
        return self.parent / name

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.rstrip('/')}/{name}" if not self.endswith("://") else f"{self}{name}")


Place = Path | Url


@dataclass
class HeldBytes:
    """The bytes of one file that a store has sent last, which several readers of the file may share.

    Args:
        start: where they begin in the file.
        content: the bytes.
    """

    start: int = 0
    content: memoryview = field(default_factory=lambda: memoryview(b""))


def place(name: str | os.PathLike[str]) -> Place:
    """Return the place that a user names.

    Raises:
        CheckpointError: if it is neither a path nor the URL of one store.
    """
    text = os.fspath(name)
    scheme, mark, rest = text.partition("://")
    if not mark or "/" in scheme:
        shortened = re.match(r"([a-z][a-z0-9+.-]+):/", text, re.IGNORECASE)
        if shortened is not None and not os.path.isdir(f"{shortened[1]}:"):
            raise CheckpointError(
                f"{text!r} is a URL that pathlib.Path has shortened, and would be a folder of this machine. Pass it as "
                f"a str: '{shortened[1]}://...'"
            )
        return Path(text)
    if _SCHEME.fullmatch(scheme) is None:
        raise CheckpointError(
            f"{text!r} is neither a path nor the URL of one store, so nothing can be saved there in one step. Name the "
            "store itself, such as 's3://bucket/run'"
        )
    return Path(rest) if scheme in _LOCAL else Url(text.rstrip("/") if rest.strip("/") else text)


def absolute(name: str | os.PathLike[str]) -> Place:
    """Return the place that a user names, independent of the working directory."""
    found = place(name)
    return Path(os.path.abspath(found)) if isinstance(found, Path) else found


def local_path(name: str | os.PathLike[str], call: str) -> Path:
    """Return the path that a user names for a call that writes or reads files of other programs.

    Raises:
        CheckpointError: if it is a URL; the message names ``call``.

    Example:
        >>> local_path("runs/last", "save_weights")
        PosixPath('runs/last')
    """
    found = place(name)
    if isinstance(found, Url):
        raise CheckpointError(
            f"{call} works on local disks only, and {found} is a URL, so no file would get there. Name a local folder; "
            "meshwright.save_checkpoint and load_checkpoint take URLs, and `meshwright export` reads them"
        )
    return found


T = TypeVar("T")


def read_same(folder: Place, read: Callable[[], tuple[T, str]]) -> T:
    """Read the same files on all ranks; every rank must make the call.

    Args:
        folder: the folder of the files.
        read: function that returns what it has read, and a digest of that.

    Raises:
        CheckpointError: on every rank, if a file is damaged on one of them, or their digests differ.
    """
    found, digests = exchange_together(read)
    if others := [rank for rank, other in enumerate(digests) if other != digests[0]]:
        raise CheckpointError(
            f"rank(s) {', '.join(map(str, others))} see another checkpoint in {folder} than rank 0; copy one to every "
            "host"
        )
    return found
