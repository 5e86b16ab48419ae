"""What fsspec knows as a :class:`Storage`: ``s3://``, ``gs://``, ``memory://`` and every other URL.

An object store renames nothing, but replaces one object in one step. So each save gives its files names of its own,
with a tag, and the seal, which lists them, is written last: a reader finds the old save or the new one, whole. What no
seal lists is of a save that was killed, or still runs. A save removes such files in its own folder, and those in
folders without a seal beside it a day after the last of them was written, by the store's clock; it also aborts uploads
to S3 that were never completed. Removing a folder begins with its seal.

Credentials and endpoints are those that fsspec is configured with. No store has locks.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

from meshwright.checkpoint.files.local_disk import note_saved
from meshwright.checkpoint.files.place import HeldBytes, Url
from meshwright.errors import CheckpointError, RemoteError

logger = logging.getLogger(__name__)

_RANGE = 8 * 2**20  # bytes of one request
_AHEAD = 4  # ranges that are read at once, ahead of what was asked for
_LEFT = timedelta(days=1)  # without a write, after which a save is taken to have ended
_TAGGED = re.compile(r"part-\d{5,}-[0-9a-f]{8}\.(safetensors|json)$")  # the end of the name of a save's file


@contextlib.contextmanager
def _asking(url: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, RemoteError, CheckpointError):
        raise
    except Exception as error:  # each store has classes of its own, such as botocore's
        raise RemoteError(f"{url}: {type(error).__name__}: {error}") from error


class _ListedObject:
    def __init__(self, found: dict[str, Any]):
        self.size = self.held = int(found["size"] or 0)
        self.is_folder = found["type"] == "directory"


class _StoredObject:
    """Reads ranges of an object, and some of them ahead if the caller reads in order."""

    def __init__(self, files: Any, path: Url, until: int | None, ahead: HeldBytes):
        self.path, self._files, self._until, self._ahead = path, files, until, ahead

    @property
    def size(self) -> int:
        with _asking(self.path):
            self._files.invalidate_cache()
            return int(self._files.info(str(self.path))["size"])

    def read_some(self, offset: int, memory: memoryview) -> int:
        ahead = self._ahead
        if not ahead.start <= offset < ahead.start + len(ahead.content):
            stop = max(offset + len(memory), self._until or 0)
            ahead.start, ahead.content = offset, self._fetch(offset, min(stop, offset + _AHEAD * _RANGE))
        found = ahead.content[offset - ahead.start :][: len(memory)]
        memory[: len(found)] = found
        if offset + len(found) == ahead.start + len(ahead.content):
            ahead.content = memoryview(b"")  # all of it was read
        return len(found)

    def _fetch(self, start: int, stop: int) -> memoryview:
        starts = list(range(start, stop, _RANGE))
        paths, stops = [str(self.path)] * len(starts), [*starts[1:], stop]
        try:
            with _asking(self.path):
                return memoryview(b"".join(self._files.cat_ranges(paths, starts, stops, on_error="raise")))
        except RemoteError:
            if stop <= (size := self.size):
                raise
            return self._fetch(start, size) if start < size else memoryview(b"")  # S3 refuses ranges beyond the end


class _NewObject:
    """An object that appears when it is closed. An error discards it, with the parts that were sent."""

    def __init__(self, files: Any, path: Url):
        self._path = path
        with _asking(path):
            self._file = files.open(str(path), "wb")

    def write(self, memory: memoryview | bytes) -> None:
        with _asking(self._path):
            self._file.write(memory)

    def close(self) -> None:
        with _asking(self._path):
            self._file.close()

    def __enter__(self) -> _NewObject:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        is_complete = False
        try:
            if kind is None:
                self.close()
                is_complete = True
        finally:
            if not is_complete:
                with contextlib.suppress(Exception):
                    self._file.discard()
                    self._file.closed = True  # otherwise its destructor would complete it


class ObjectStore:
    """A store that fsspec knows, without folders, renames or locks."""

    hides_saves = False

    def __init__(self, files: Any):
        self._files = files

    @staticmethod
    def of(url: Url) -> ObjectStore:
        """Return the store of a URL.

        Raises:
            CheckpointError: if the package that knows the scheme is missing, or fsspec's configuration is wrong.
        """
        try:
            files, _ = importlib.import_module("fsspec").url_to_fs(str(url))
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{url} cannot be opened: {error}. fsspec's pages list its stores") from error
        return ObjectStore(files)

    def entries(self, folder: Url) -> dict[str, _ListedObject]:
        with _asking(folder):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(str(folder), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        own = self._files._strip_protocol(str(folder)).rstrip("/")  # listed where a tool has made an object of it
        paths = ((entry["name"].rstrip("/"), entry) for entry in found)
        return {path.rpartition("/")[2]: _ListedObject(entry) for path, entry in paths if path != own}

    @contextlib.contextmanager
    def reading(
        self, path: Url, *, until: int | None = None, follows_links: bool = False, ahead: HeldBytes | None = None
    ) -> Iterator[_StoredObject]:
        yield _StoredObject(self._files, path, until, ahead or HeldBytes())

    def new_file(self, path: Url) -> _NewObject:
        return _NewObject(self._files, path)

    def write_file(self, path: Url, content: bytes) -> None:
        with _asking(path):
            self._files.pipe_file(str(path), content)

    def stage(self, target: Url, is_ours: Callable[[Url], bool], seal: str) -> StagedObjects:
        if not target.parent.partition("://")[2].strip("/"):
            raise CheckpointError(f"{target} is in no folder; save to one below it, such as {target / 'step-1'}")
        return StagedObjects(self, target, is_ours, seal)

    def staged(self, target: Url, name: str) -> tuple[Url, str]:
        return target, name

    def locked(self, folder: Url) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def replaced(self, parent: Url) -> dict[str, Url]:
        return {}

    def remove_folder(self, folder: Url, seal: str) -> None:
        try:
            self.remove(folder, sorted(self.entries(folder), key=lambda name: name != seal))
        except OSError as error:
            logger.warning("%s could not be removed (%s). The new checkpoint is complete", folder, error)

    def remove(self, folder: Url, names: list[str]) -> None:
        """Remove objects, one after the other; other jobs may remove them at the same time."""
        for name in names:
            with _asking(folder / name), contextlib.suppress(FileNotFoundError):
                self._files.rm_file(str(folder / name))

    def written(self, path: Url) -> datetime:
        """Return when an object was written, by the store's clock."""
        with _asking(path):
            self._files.invalidate_cache()
            found: datetime = self._files.modified(str(path))
            return found

    def uploads(self, folder: Url) -> list[dict[str, Any]]:
        """Return the uploads to S3 below a folder that nothing has completed; other stores drop theirs themselves."""
        if hasattr(self._files, "abort_mpu"):
            bucket, key, _ = self._files.split_path(str(folder))
            with contextlib.suppress(OSError):  # which few credentials may list
                found = self._files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/")
                return [upload for upload in found.get("Uploads", []) if _TAGGED.search(upload["Key"])]
        return []

    def is_in(self, folder: Url, upload: dict[str, Any]) -> bool:
        """Return whether such an upload is to a file of a folder itself."""
        return bool(upload["Key"].rpartition("/")[0] == self._files.split_path(str(folder))[1])

    def abort(self, folder: Url, upload: dict[str, Any]) -> None:
        """Abort such an upload."""
        with _asking(folder):
            self._files.abort_mpu(self._files.split_path(str(folder))[0], upload["Key"], upload["UploadId"])


class StagedObjects:
    """The files of one save, on the rank that commits it.

    Args:
        store: the store.
        target: the folder that the save gets.
        is_ours: function that returns whether all that a folder holds are files of checkpoints.
        seal: the name of the file that lists all others.

    Raises:
        CheckpointError: if ``target`` holds other files.
    """

    def __init__(self, store: ObjectStore, target: Url, is_ours: Callable[[Url], bool], seal: str):
        self.target = self.path = target
        self.name = self.tag = uuid.uuid4().hex[:8]
        self._store, self._is_ours, self._seal = store, is_ours, seal
        self._older = [name for name in store.entries(target) if name != seal]
        self._is_committed = False
        if self._older and not is_ours(target):
            raise CheckpointError(
                f"{target} holds something else than a checkpoint of Meshwright, for example a checkpoint of another "
                "library; save to a folder of another name"
            )

    def commit(self) -> None:
        """Remove what the seal, which was written last, has replaced, and what killed saves have left."""
        self._is_committed = True
        note_saved(self.target)
        try:
            self._store.remove(self.target, self._older)
            self._remove_leftovers()
        except OSError as error:
            logger.warning(
                "older files beside %s could not be removed (%s). The new checkpoint is complete; the next save tries "
                "again", self.target, error,
            )  # fmt: skip

    def close(self) -> None:
        """Remove the files of a save that failed before its seal was written."""
        if self._is_committed:
            return
        with contextlib.suppress(OSError):
            with self._store.reading(self.target / self._seal) as seal, contextlib.suppress(FileNotFoundError):
                content = bytearray(seal.size)
                # The store may have taken a seal whose answer was lost.
                if seal.read_some(0, memoryview(content)) != len(content) or f"-{self.tag}.".encode() in content:
                    return
            self._store.remove(
                self.target, [name for name in self._store.entries(self.target) if f"-{self.tag}." in name]
            )

    def _remove_leftovers(self) -> None:
        store, parent = self._store, self.target.parent
        folders = [parent / name for name, entry in store.entries(parent).items() if entry.is_folder]
        unsealed = [folder for folder in folders if self._seal not in store.entries(folder) and self._is_ours(folder)]
        uploads = store.uploads(parent)
        if not unsealed and not uploads:
            return
        limit = store.written(self.target / self._seal) - _LEFT
        for folder in unsealed:
            names = list(store.entries(folder))
            # Files of other programs may be called part-00000.json too.
            if names and all(map(_TAGGED.search, names)) and max(store.written(folder / x) for x in names) < limit:
                store.remove(folder, names)
        for upload in uploads:
            if upload["Initiated"] < limit or store.is_in(self.target, upload):
                store.abort(parent, upload)
