"""The local disk as a :class:`Storage`: hidden folders that one rename makes visible."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from meshwright.checkpoint.files import disk
from meshwright.checkpoint.files.held_bytes import HeldBytes
from meshwright.checkpoint.files.staged_folder import (
    StagedFolder,
    locked,
    remove_visible_folder,
    replaced_folders,
    staged_path,
)
from meshwright.errors import CheckpointError


class _ListedFile:
    """An entry of a folder, which is looked at only when it is asked for."""

    def __init__(self, entry: os.DirEntry[str]):
        self._entry = entry

    @property
    def size(self) -> int:
        try:
            return self._entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:  # another job has just removed it
            return -1

    @property
    def held(self) -> int:
        return self._entry.stat(follow_symlinks=False).st_blocks * 512

    @property
    def is_folder(self) -> bool:
        return self._entry.is_dir(follow_symlinks=False)


class _OpenFile:
    def __init__(self, path: Path, descriptor: int):
        self.path, self._descriptor = path, descriptor

    @property
    def size(self) -> int:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{self.path} is not an ordinary file")
        return status.st_size

    def read_some(self, offset: int, memory: memoryview) -> int:
        return os.preadv(self._descriptor, [memory], offset)


class LocalDisk:
    """The local disk, or a file system of a network that is mounted as one."""

    hides_saves = True

    def entries(self, folder: Path) -> dict[str, _ListedFile]:
        try:
            with os.scandir(folder) as entries:
                return {entry.name: _ListedFile(entry) for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    @contextlib.contextmanager
    def reading(
        self, path: Path, *, until: int | None = None, follows_links: bool = False, ahead: HeldBytes | None = None
    ) -> Iterator[_OpenFile]:
        # Without waiting for a pipe's other end, which may never come.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW))
        try:
            yield _OpenFile(path, descriptor)
        finally:
            os.close(descriptor)

    def new_file(self, path: Path) -> disk.NewFile:
        return disk.NewFile(path)

    def write_file(self, path: Path, content: bytes) -> None:
        disk.write_file(path, content)

    def stage(self, target: Path, is_ours: Callable[[Path], bool], seal: str) -> StagedFolder:
        return StagedFolder(target, is_ours)

    def staged(self, target: Path, name: str) -> tuple[Path, str]:
        return staged_path(target, name), ""

    def locked(self, folder: Path) -> contextlib.AbstractContextManager[None]:
        return locked(folder)

    def replaced(self, parent: Path) -> dict[str, Path]:
        return replaced_folders(parent)

    def remove_folder(self, folder: Path, seal: str) -> None:
        remove_visible_folder(folder)
