"""Folders that exist whole or not at all, whenever the job is killed.

A save writes into a hidden folder beside its target and renames it at the end. A folder that is replaced or removed is
renamed to a hidden name first. So a folder with a plain name is whole, unless something else damaged it.

Jobs may save below one parent at a time. A hidden folder in which a job is writing is locked, and other jobs of its
host leave it alone. Locks may not reach other hosts, so a folder of another host is a leftover only if nothing has been
written to it for a day, by the clock of the file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from meshwright.checkpoint.files import disk
from meshwright.checkpoint.files.launchers_note import note_saved
from meshwright.errors import CheckpointError

# The last part is random; 8 digits after it are the host's (older versions wrote none).
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|replaced|removed)-[0-9a-f]{8}(-(?P<host>[0-9a-f]{8}))?")
_DAY = 24 * 3600  # seconds without a write, after which a job of another host is taken to have ended


class StagedFolder:
    """The hidden folder of one save, on the rank that commits it.

    ``path`` is the folder to write to. It has the name of the target and lies in the hidden folder.

    Args:
        target: the folder that the save gets.
        is_ours: function that returns whether the files in ``target`` are an older save, which may be replaced.

    Raises:
        CheckpointError: if ``target`` holds other files.
    """

    def __init__(self, target: Path, is_ours: Callable[[Path], bool]):
        target = self.target = target.resolve()  # through a link: the folder behind it is replaced, not the link
        if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not is_ours(target))):
            raise CheckpointError(
                f"{target} exists and holds something else than a checkpoint of Meshwright, for example a checkpoint "
                "of another library; save to a folder of another name"
            )
        disk.make_folder(target.parent)
        self._hidden = _hidden(target, "saving")
        self.path = self._hidden / target.name
        with locked(target.parent):  # else another save could remove the folder before it has its lock
            remove_leftovers(target.parent)
            disk.make_folder(self._hidden)
            # The lock tells a save in progress from the leftovers of one that was killed.
            self._lock = os.open(self._hidden, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            disk.make_folder(self.path)
        except BaseException:
            self.close()
            raise

    def commit(self) -> None:
        """Make the folder visible under its name; its files are complete and on the disk.

        Raises:
            OSError: if the disk fails; the target then has what it had before.
        """
        disk.sync_folder(self.path)
        replaced = None
        if self.target.exists():
            replaced = _hidden(self.target, "replaced")
            try:
                disk.rename(self.target, replaced)
            except FileNotFoundError:  # the rotation of another job has just removed it
                replaced = None
        try:
            disk.rename(self.path, self.target)
        except OSError:
            if replaced is not None:
                disk.rename(replaced, self.target)
            raise
        disk.sync_folder(self.target.parent)
        if replaced is not None:
            disk.remove_folder(replaced)
        note_saved(self.target)

    def close(self) -> None:
        """Remove the hidden folder, with what a failed save has left in it, and release the lock."""
        if self._hidden.exists():
            with contextlib.suppress(OSError):
                disk.remove_folder(self._hidden)
        os.close(self._lock)


def remove_visible_folder(path: Path) -> None:
    """Remove a visible folder, unless another job has. If this one is killed half-way, the folder is hidden."""
    hidden = _hidden(path, "removed")
    with contextlib.suppress(FileNotFoundError):
        disk.rename(path, hidden)
        disk.remove_folder(hidden)


def remove_leftovers(parent: Path) -> None:
    """Remove what killed saves have left in a folder, and restore what they were about to replace."""
    restore_replaced(parent)
    for path, _, kind in list(hidden_folders(parent)):
        if kind != "saving" or not _is_in_use(path):
            disk.remove_folder(path)


def restore_replaced(parent: Path) -> None:
    """Restore the names of the folders in ``parent`` whose replacement was killed between its two renames."""
    found = list(hidden_folders(parent))
    in_progress = {name for path, name, kind in found if kind == "saving" and _is_in_use(path)}
    for path, name, kind in found:
        if kind == "replaced" and name not in in_progress and not (parent / name).exists():
            with contextlib.suppress(FileNotFoundError):  # another job has restored it
                disk.rename(path, parent / name)


def about_to_be_replaced(target: Path) -> Path | None:
    """Return the path of a folder whose replacement was killed between its two renames; None if it is in place."""
    if target.exists():
        return None
    found = (path for path, name, kind in hidden_folders(target.parent) if (name, kind) == (target.name, "replaced"))
    return next(found, None)


def replaced_folders(parent: Path) -> list[Path]:
    """Return the paths of the folders whose replacement was killed between its two renames."""
    found = (path for path, name, kind in hidden_folders(parent) if kind == "replaced" and not (parent / name).exists())
    return list(found)


def is_hidden(path: Path) -> bool:
    """Whether a path has the name of a hidden folder of a save."""
    return _HIDDEN.fullmatch(path.name) is not None


def hidden_folders(parent: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the hidden folders of saves in a folder, each with the name of its target and its kind."""
    for path in parent.iterdir() if parent.is_dir() else ():
        if match := _HIDDEN.fullmatch(path.name):
            yield path, match["name"], match["kind"]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_in_use(path: Path) -> bool:
    """Whether a job is writing to a hidden folder; a folder that has just been removed is left to who did that."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    match = _HIDDEN.fullmatch(path.name)
    host = match and match["host"]
    return host not in (None, _host()) and _seconds_since_write(path) < _DAY


def _seconds_since_write(folder: Path) -> float:
    """Return how long nothing has been written to a folder, by the clock that sets the times of its files."""
    last = max(_written(Path(root, name)) for root, _, names in os.walk(folder) for name in (".", *names))
    try:
        with tempfile.TemporaryFile(dir=folder.parent) as now:  # this host's clock may differ from the file system's
            return os.fstat(now.fileno()).st_mtime - last
    except OSError:
        return 0.0


def _written(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


@functools.cache
def _host() -> str:
    """Eight digits of this host since it has started; processes with the same ones share locks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        boot = f"{uuid.getnode():x}"
    return hashlib.blake2b(boot.encode(), digest_size=4).hexdigest()


def _hidden(target: Path, kind: str) -> Path:
    return target.parent / f".{target.name}.{kind}-{uuid.uuid4().hex[:8]}-{_host()}"
