"""The seam for storage: all that saving, loading and inspecting a checkpoint asks of the place where it is.

A :class:`Storage` lists, reads ranges, writes, commits and removes. The local disk is one, and fsspec has all others.
Each function may raise an ``OSError``; that of a store is a ``RemoteError``, which nobody takes for "it is not there".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from meshwright.checkpoint.files.local_disk import LocalDisk
from meshwright.checkpoint.files.object_store import ObjectStore
from meshwright.checkpoint.files.place import HeldBytes, Place


class StoredEntry(Protocol):
    """A file or a folder in a listing: its size, and the bytes that it holds of its store, which may be fewer."""

    @property
    def size(self) -> int: ...
    @property
    def held(self) -> int: ...
    @property
    def is_folder(self) -> bool: ...


class StoredFile(Protocol):
    """A file that is open for reading."""

    @property
    def path(self) -> Place: ...
    @property
    def size(self) -> int: ...

    def read_some(self, offset: int, memory: memoryview) -> int:
        """Fill the start of some memory with the bytes from ``offset`` on; return how many, 0 at the end."""


class GrowingFile(Protocol):
    """A file that is being written. A reader finds it after ``close`` alone, or sees it grow in a staged folder."""

    def write(self, memory: memoryview | bytes) -> None:
        """Append all of some memory."""

    def close(self) -> None:
        """Complete the file; it is then kept through a crash."""

    def __enter__(self) -> GrowingFile: ...
    def __exit__(self, *error: Any) -> None:
        """Complete the file, or discard it after an error."""


class Staging(Protocol):
    """One save, on the rank that commits it.

    Args:
        target: the folder that the save gets.
        path: the folder to which the ranks write.
        name: the text by which other ranks find that folder (see ``Storage.staged``).
        tag: what the names of its files have after a hyphen; empty where ``path`` holds no other save.
    """

    target: Any
    path: Any
    name: str
    tag: str

    def commit(self) -> None:
        """Make visible, in one step, a save whose seal was written to ``path``; remove what it replaces.

        Where the seal is what a reader looks for, writing it was this step.
        """

    def close(self) -> None:
        """Remove what a save that was not committed has left."""


class Storage(Protocol):
    """A kind of storage.

    Args:
        hides_saves: whether a folder is found by its name only once its save is complete. Otherwise a folder without a
            seal is a save that has not ended.
    """

    hides_saves: bool

    def entries(self, folder: Any, /) -> Mapping[str, StoredEntry]:
        """Return what is in a folder, by name; nothing if there is no such folder."""

    def reading(
        self, path: Any, /, *, until: int | None = None, follows_links: bool = False, ahead: HeldBytes | None = None
    ) -> AbstractContextManager[StoredFile]:
        """Open a file; see :func:`reading`."""

    def new_file(self, path: Any, /) -> GrowingFile:
        """Begin a file, in memory of a fixed size."""

    def write_file(self, path: Any, content: bytes, /) -> None:
        """Write a small file in one step, and keep it through a crash."""

    def stage(self, target: Any, is_ours: Callable[[Any], bool], seal: str, /) -> Staging:
        """Begin a save to a folder, which is new, empty or ``is_ours``; what killed saves have left may go."""

    def staged(self, target: Any, name: str, /) -> tuple[Any, str]:
        """Return the path and the tag of the :class:`Staging` of another rank, once this rank sees it."""

    def locked(self, folder: Any, /) -> AbstractContextManager[None]:
        """Keep other jobs from committing in a folder, where the storage has locks."""

    def replaced(self, parent: Any, /) -> Mapping[str, Any]:
        """Return the hidden places of folders in ``parent`` whose replacement was killed half-way, by their names."""

    def remove_folder(self, folder: Any, seal: str, /) -> None:
        """Remove a folder so that a crash on the way leaves none that looks whole."""


def storage_of(place: Place) -> Storage:
    """Return the storage of a place: a path of the local disk, or a URL, by its scheme.

    Raises:
        CheckpointError: if the package that knows the scheme is missing.
    """
    return LocalDisk() if isinstance(place, Path) else ObjectStore.of(place)
