"""Checkpoints as folders: each exists whole or not at all, whenever the job is killed.

A save writes into a hidden folder beside its target and renames it at the end. A checkpoint that is replaced or removed
is renamed to a hidden name first. So a folder with a plain name is whole, unless something else damaged it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from meshwright.checkpoint import disk
from meshwright.checkpoint.manifest import NAME, Manifest
from meshwright.errors import CheckpointError

logger = logging.getLogger(__name__)

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|replaced|removed)-[0-9a-f]{8}")
_PART = re.compile(r"part-\d{5,}\.(safetensors|json)")


class Replacement:
    """A hidden folder beside a target, which takes the target's place when it is complete.

    Args:
        target: the folder that is to be replaced; it need not exist.
    """

    def __init__(self, target: Path):
        self.target = target.resolve()  # through a link: the folder behind it is replaced, not the link
        disk.make_folder(self.target.parent)
        self.path = _hidden(self.target, "saving")
        with _locked(self.target.parent):  # else another save could remove the folder before it has its lock
            _clean_hidden(self.target.parent)
            disk.make_folder(self.path)
            # The lock tells a save in progress from the leftovers of one that was killed.
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def publish(self) -> None:
        """Put the folder in the place of its target: its files are complete and on the disk.

        Raises:
            OSError: if the disk fails; the target is then what it was before. If only the old files cannot be
                removed, it is the new one.
        """
        disk.sync_folder(self.path)
        replaced = None
        if self.target.exists():
            replaced = _hidden(self.target, "replaced")
            disk.rename(self.target, replaced)
        try:
            disk.rename(self.path, self.target)
        except OSError:
            if replaced is not None:
                disk.rename(replaced, self.target)
            raise
        disk.sync_folder(self.target.parent)
        if replaced is not None:
            disk.remove_folder(replaced)

    def close(self) -> None:
        """Remove what is left if the save has failed, and release the lock."""
        if self.path.exists():
            with contextlib.suppress(OSError):
                disk.remove_folder(self.path)
        os.close(self._lock)


class Staging(Replacement):
    """The hidden folder of one save, on the rank that commits it.

    Args:
        target: the folder that the checkpoint gets.

    Raises:
        CheckpointError: if ``target`` holds something that is not a checkpoint.
    """

    def __init__(self, target: Path):
        if target.exists() and not _is_ours(target) and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(
                f"{target} exists and holds something else than a checkpoint; save to a folder of another name"
            )
        super().__init__(target)

    def commit(self, manifest: Manifest) -> None:
        """Make the checkpoint visible: its files are complete and on the disk.

        Raises:
            CheckpointError: if a file of another rank is not there.
            OSError: if the disk fails; the folder then has what it had before.
        """
        if absent := absent_files(self.path, manifest):
            raise CheckpointError(
                f"rank 0 does not see {absent[0]}, which another rank wrote to {self.path}: all hosts must save to one "
                "shared file system"
            )
        manifest.write(self.path)
        self.publish()


def find_checkpoint(folder: Path) -> tuple[Path, Manifest]:
    """Return the checkpoint that a folder is, or the newest whole one in it.

    Raises:
        CheckpointError: if there is none, or the folder is one that is not whole.
    """
    if is_checkpoint(folder):
        return folder, _read_whole(folder)
    if found := newest_checkpoint(folder):
        return found
    for path in _replaced(folder.parent):
        if _original(path) == folder:
            return path, _read_whole(path)
    raise CheckpointError(f"there is no checkpoint in {folder}; name a folder that meshwright.save_checkpoint wrote")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has files of a checkpoint, whole or not."""
    try:
        names = os.listdir(folder)
    except OSError:  # a folder of somebody else, beside ours
        return False
    return any(name == NAME or _PART.fullmatch(name) for name in names)


def checkpoint_folders(parent: Path) -> list[Path]:
    """Return the checkpoints in a folder, whole or not, in the order of their names."""
    paths = sorted(parent.iterdir()) if parent.is_dir() else []
    return [
        p for p in paths if p.is_dir() and not p.is_symlink() and not _HIDDEN.fullmatch(p.name) and is_checkpoint(p)
    ]


def foreign_files(folder: Path) -> list[str]:
    """Return the names in a folder that are not those of a checkpoint's files."""
    return sorted(path.name for path in folder.iterdir() if path.name != NAME and not _PART.fullmatch(path.name))


def newest_checkpoint(parent: Path) -> tuple[Path, Manifest] | None:
    """Return the checkpoint in a folder that was written last and is whole; None if there is none."""
    whole = []
    for path, manifest in _checkpoints(parent):
        if manifest is not None:
            whole.append((manifest.written, path, manifest))
        else:
            logger.warning("%s is not a whole checkpoint and is skipped; `meshwright inspect` says what is wrong", path)
    return max(whole, key=lambda item: item[0])[1:] if whole else None


def keep_newest(parent: Path, count: int) -> None:
    """Remove all whole checkpoints of a folder but the newest ``count``, and none that has files of others in it."""
    found = [(manifest.written, path) for path, manifest in _checkpoints(parent) if manifest is not None]
    whole = [(written, path) for written, path in found if _is_ours(path)]
    for _, path in sorted(whole)[:-count]:
        _remove(path)


def absent_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return the files of a checkpoint that are missing or of another size."""
    return [name for name, record in manifest.files.items() if _size(folder / name) != record.bytes]


def _read_whole(folder: Path) -> Manifest:
    manifest = Manifest.read(folder)
    if absent := absent_files(folder, manifest):
        raise CheckpointError(
            f"{folder} is not whole: {len(absent)} file(s) are missing or have another size than when they were saved: "
            f"{', '.join(absent[:5])}; load another checkpoint"
        )
    return manifest


def _checkpoints(parent: Path) -> Iterator[tuple[Path, Manifest | None]]:
    """The checkpoints in a folder; the manifest of one that is not whole is None."""
    for path in [*checkpoint_folders(parent), *_replaced(parent)]:
        try:
            yield path, _read_whole(path)
        except CheckpointError:
            yield path, None


def _replaced(parent: Path) -> list[Path]:
    """The checkpoints of a job that was killed between the two renames that replace a checkpoint."""
    found = [path for path in _hidden_folders(parent) if _kind(path) == "replaced"]
    return [path for path in found if not _original(path).exists()]


def _kind(hidden: Path) -> str:
    match = _HIDDEN.fullmatch(hidden.name)
    assert match is not None
    return match["kind"]


def _original(hidden: Path) -> Path:
    match = _HIDDEN.fullmatch(hidden.name)
    assert match is not None
    return hidden.parent / match["name"]


def _is_ours(folder: Path) -> bool:
    """Whether all that a folder holds are files of a checkpoint."""
    return folder.is_dir() and is_checkpoint(folder) and not foreign_files(folder)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1


def _clean_hidden(parent: Path) -> None:
    """Remove what killed saves have left in a folder."""
    for path in _replaced(parent):
        disk.rename(path, _original(path))
    for path in list(_hidden_folders(parent)):
        if _kind(path) != "saving" or not _is_locked(path):
            disk.remove_folder(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _hidden_folders(parent: Path) -> Iterator[Path]:
    return (path for path in (parent.iterdir() if parent.is_dir() else ()) if _HIDDEN.fullmatch(path.name))


def _hidden(target: Path, kind: str) -> Path:
    return target.parent / f".{target.name}.{kind}-{uuid.uuid4().hex[:8]}"


def _remove(path: Path) -> None:
    """Remove a checkpoint; killed half-way, it is no longer one."""
    hidden = _hidden(path, "removed")
    disk.rename(path, hidden)
    disk.remove_folder(hidden)
