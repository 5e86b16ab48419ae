"""The local disk as a :class:`Storage`. A save writes a hidden folder and renames it, so a folder exists whole or not
at all.

A save writes into a hidden folder beside its target and renames it at the end. A folder that is replaced or removed is
renamed to a hidden name first. So a folder with a plain name is whole, unless something else damaged it.

Jobs may save below one parent at a time. A hidden folder in which a job is writing is locked, and other jobs of its
host leave it alone: they remove a folder while they hold its lock. Locks may not reach other hosts, and some file
systems refuse them. There a folder is a leftover only if nothing has been written to it for a day, by the clock of the
file system.

Nothing here waits for a lock for ever, since anybody who may read a folder can lock it.

A program tells ``meshwright launch`` of each folder that it has saved, so that the launcher can name the newest one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from meshwright.checkpoint.files import disk
from meshwright.checkpoint.files.place import HeldBytes, Place, place
from meshwright.errors import CheckpointError
from meshwright.printable import shell_word

logger = logging.getLogger(__name__)

# The path of a file to which a program appends the folders that it has saved, one line of JSON each.
SAVED_VARIABLE = "MESHWRIGHT_SAVED"
# The last part is random; 8 digits after it are the host's (older versions wrote none).
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|replaced|removed)-[0-9a-f]{8}(-(?P<host>[0-9a-f]{8}))?")
_TRIES = 5  # names of a hidden folder that are tried, if others lock it at once
LOCK_TIME = 10.0  # seconds to wait for a lock, which its holder needs for the renames of one save
LATE = 10.0  # seconds by which a host may see later what another one has written, on a network's file system
_DAY = 24 * 3600  # seconds without a write, after which a job of another host is taken to have ended


class StagedFolder:
    """The hidden folder of one save, on the rank that commits it.

    ``path`` is the folder to write to. It has the name of the target and lies in the hidden folder, ``name``.

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
        remove_leftovers(target.parent)
        self._hidden, self._lock = _locked_folder(target)
        self.path, self.name, self.tag = self._hidden / target.name, self._hidden.name, ""
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
        note_saved(self.target)
        if replaced is not None:
            _remove_old(replaced, self.target)

    def close(self) -> None:
        """Remove the hidden folder, with what a failed save has left in it, and release the lock."""
        if self._hidden.exists():
            with contextlib.suppress(OSError):
                disk.remove_folder(self._hidden)
        os.close(self._lock)


def staged_path(target: Path, hidden: str) -> Path:
    """Return the path to which the ranks write a save, once this rank sees it.

    Args:
        target: the folder that the save gets, as this rank was told by its own program.
        hidden: the name of the hidden folder that the committing rank has made beside its target.

    Raises:
        CheckpointError: if that is no name of such a folder, or it is not visible within some seconds.
    """
    target = target.resolve()
    match = _HIDDEN.fullmatch(hidden)
    if match is None or (match["name"], match["kind"]) != (target.name, "saving") or "/" in hidden:
        raise CheckpointError(
            f"rank 0 saves to {hidden[:200]!r}, which is no hidden folder beside {target}: pass the same folder on "
            "every rank"
        )
    path = target.parent / hidden / target.name
    if not seen_in_time(path.is_dir, target.parent):
        raise CheckpointError(
            f"this rank did not see {path} within {LATE:g} s, which rank 0 has made: all hosts must save to one shared "
            "file system, by the same path"
        )
    return path


def seen_in_time(is_there: Callable[[], bool], parent: str | os.PathLike[str]) -> bool:
    """Return whether a condition on files holds within some seconds, since hosts see each other's files late.

    Args:
        is_there: the condition.
        parent: the folder of the files, which is listed again so that the host asks the file system.
    """
    deadline, pause = time.monotonic() + LATE, 0.05
    while not (found := is_there()) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
        with contextlib.suppress(OSError):
            os.listdir(parent)
    return found


def remove_visible_folder(path: Path) -> None:
    """Remove a visible folder, unless another job has. If this one is killed half-way, the folder is hidden.

    One that cannot be removed, such as one with a file that a program holds open on NFS, is named and stays.
    """
    hidden = _hidden(path, "removed")
    try:
        disk.rename(path, hidden)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s could not be removed (%s), and stays. The new checkpoint is complete", path, error)
        return
    _remove_old(hidden, path)


def _remove_old(hidden: Path, shown: Path) -> None:
    """Remove what was hidden; the save is complete already, so a folder that stays must not fail it."""
    try:
        disk.remove_folder(hidden)
    except OSError as error:
        logger.warning(
            "the older files of %s could not be removed (%s). The new checkpoint is complete; the next save to %s "
            "tries again to remove %s", shown, error, shown.parent, hidden.name,
        )  # fmt: skip


def remove_leftovers(parent: Path) -> None:
    """Remove what killed saves have left in a folder, and restore what they were about to replace.

    What cannot be removed stays for the next save.
    """
    restore_replaced(parent)
    found = list(hidden_folders(parent))
    in_progress = _in_progress(found)
    for path, name, kind in found:
        if kind != "saving" and name in in_progress:
            continue  # its own save removes it
        with contextlib.suppress(OSError), _free_of_jobs(path) as is_free:
            if is_free or kind != "saving":
                disk.remove_folder(path)


def restore_replaced(parent: Path) -> None:
    """Restore the names of the folders in ``parent`` whose replacement was killed between its two renames."""
    found = list(hidden_folders(parent))
    in_progress = _in_progress(found)
    for path, name, kind in found:
        if kind == "replaced" and name not in in_progress and not (parent / name).exists():
            with contextlib.suppress(FileNotFoundError):  # another job has restored it
                disk.rename(path, parent / name)


def replaced_folders(parent: Path) -> dict[str, Path]:
    """Return the paths of the folders whose replacement was killed between its two renames, by their names."""
    found = hidden_folders(parent)
    return {name: path for path, name, kind in found if kind == "replaced" and not (parent / name).exists()}


def is_hidden(name: str) -> bool:
    """Whether a name is that of a hidden folder of a save."""
    return _HIDDEN.fullmatch(name) is not None


def hidden_folders(parent: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the hidden folders of saves in a folder, each with the name of its target and its kind."""
    for path in parent.iterdir() if parent.is_dir() else ():
        if match := _HIDDEN.fullmatch(path.name):
            yield path, match["name"], match["kind"]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a folder, or go on without it if another program keeps it for longer than any save needs."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LOCK_TIME
        while _lock(descriptor) is False:
            if time.monotonic() > deadline:
                logger.warning(
                    "another program has held the lock of %s for %g s, so this save goes on without it. If no other "
                    "job saves there, look for the program: fuser -v %s", path, LOCK_TIME, shell_word(path),
                )  # fmt: skip
                break
            time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def note_saved(folder: Place) -> None:
    """Note a folder that is complete, if ``meshwright launch`` on this machine has started this program."""
    if path := os.environ.get(SAVED_VARIABLE):
        with contextlib.suppress(OSError), open(path, "a") as file:  # the launcher is gone, or on another machine
            file.write(json.dumps(str(folder)) + "\n")


def noted(path: Path) -> list[Place]:
    """Return the noted folders, the newest first."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    return [place(json.loads(line)) for line in reversed(lines)]


def _locked_folder(target: Path) -> tuple[Path, int]:
    """Make a hidden folder for a save and lock it, which tells it from the leftovers of one that was killed."""
    for _ in range(_TRIES):
        hidden = _hidden(target, "saving")
        disk.make_folder(hidden)
        # Another job that takes the folder for a leftover removes it while it has the lock, so here a lock on a folder
        # that exists cannot be lost.
        try:
            descriptor = os.open(hidden, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if _lock(descriptor) is not False and hidden.exists():
            return hidden, descriptor
        os.close(descriptor)
    raise CheckpointError(
        f"another program locks or removes every folder that is made in {target.parent}; save to a folder that only "
        "your own jobs can read"
    )


def _lock(descriptor: int) -> bool | None:
    """Take a lock if it is free; return whether it was, or None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _say_unlocked(error.strerror)
        return None
    return True


@functools.cache  # once per program
def _say_unlocked(why: str) -> None:
    logger.warning(
        "the file system of the checkpoints refuses locks (%s), so do not let two jobs save below one folder. What "
        "killed saves leave there is removed after a day", why,
    )  # fmt: skip


def _in_progress(found: list[tuple[Path, str, str]]) -> set[str]:
    """Return the names of the folders to which a job is saving."""
    names = set()
    for path, name, kind in found:
        if kind == "saving":
            with _free_of_jobs(path) as is_free:
                names |= set() if is_free else {name}
    return names


@contextlib.contextmanager
def _free_of_jobs(path: Path) -> Iterator[bool]:
    """Yield whether no job is writing to a hidden folder; none begins to as long as the context lasts.

    A folder that has just been removed, or is another user's, is left to who did that.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        lock = _lock(descriptor)
        match = _HIDDEN.fullmatch(path.name)
        is_of_host = (match and match["host"]) in (None, _host())
        yield lock is not False and ((lock and is_of_host) or _seconds_since_write(path) >= _DAY)
    finally:
        os.close(descriptor)


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
