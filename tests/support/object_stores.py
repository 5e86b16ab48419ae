"""A store that several processes share, and that ends a save at any of its steps: ``shared:///tmp/run/step-1``."""

from __future__ import annotations

import os
import tempfile
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

from support.faulty_disk import Killed


class SharedStore(LocalFileSystem):
    """A folder of the disk that has only what an object store has: no renames, links or locks, and no empty folders.

    A file that is written grows before the eyes of readers, as half of it would be there after a kill; a small file
    that is put appears in one step. Each change is a step, and from step ``fails_at`` on all of this process fail.
    """

    protocol = "shared"
    cachable = False
    steps: ClassVar[list[str]] = []
    fails_at: ClassVar[int | None] = None
    failure: ClassVar[BaseException] = Killed()

    def __init__(self, **options: Any):
        super().__init__(**{**options, "auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return os.fspath(path).removeprefix("shared://").rstrip("/") or "/"

    def ls(self, path: str, detail: bool = False, **_: Any) -> list[Any]:
        def has_files(folder: str) -> bool:
            return any(files for _, _, files in os.walk(folder))

        found = super().ls(path, detail=True)
        return [entry for entry in found if entry["type"] == "file" or has_files(entry["name"])]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" not in mode:
            return super()._open(path, mode, **options)
        step("create", path)
        file = super()._open(path, mode, **options)
        return _Growing(file)

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        step("put", path)
        place = self._strip_protocol(path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with tempfile.NamedTemporaryFile(dir="/tmp", delete=False) as file:
            file.write(value)
        os.replace(file.name, place)

    def rm_file(self, path: str) -> None:
        step("remove", path)
        os.remove(self._strip_protocol(path))

    def mv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("an object store renames nothing")

    mv_file = cp_file = link = rm = mv


class _Growing:
    def __init__(self, file: LocalFileOpener):
        self._file = file

    def write(self, content: Any) -> None:
        self._file.write(bytes(content[: len(content) // 2]))
        self._file.flush()
        step("write", self._file.path)
        self._file.write(bytes(content[len(content) // 2 :]))

    def close(self) -> None:
        self._file.close()
        step("close", self._file.path)

    def discard(self) -> None:
        self._file.close()
        step("discard", self._file.path)
        os.remove(self._file.path)


def step(name: str, path: str) -> None:
    """Count a change, or fail at it."""
    SharedStore.steps.append(f"{name} {os.path.basename(path)}")
    if SharedStore.fails_at is not None and len(SharedStore.steps) > SharedStore.fails_at:
        raise SharedStore.failure


def fail_at(number: int | None, failure: BaseException | None = None) -> None:
    """Begin to count anew, and fail at this step, from 0; never for None."""
    SharedStore.steps, SharedStore.fails_at, SharedStore.failure = [], number, failure or Killed()


fsspec.register_implementation("shared", SharedStore, clobber=True)
