"""The checkpoints in a folder: which are whole, which is the newest, and which may be removed."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import overload

from meshwright.checkpoint.manifest import NAME, Manifest
from meshwright.checkpoint.staging import Staging, about_to_be_replaced, is_hidden, remove_folder, replaced_folders
from meshwright.errors import CheckpointError

logger = logging.getLogger(__name__)

_PART = re.compile(r"part-\d{5,}\.(safetensors|json)")


def stage(target: Path) -> Staging:
    """Start the save of a checkpoint, on the rank that commits it.

    Raises:
        CheckpointError: if ``target`` holds something that is not a checkpoint.
    """
    return Staging(target, _is_ours)


def commit(staging: Staging, manifest: Manifest) -> None:
    """Make a checkpoint visible, once all of its files but the manifest are complete and on the disk.

    Raises:
        CheckpointError: if a file of another rank is not there.
        OSError: if the disk fails; the folder then has what it had before.
    """
    if absent := absent_files(staging.path, manifest):
        raise CheckpointError(
            f"rank 0 does not see {absent[0]}, which another rank wrote to {staging.path}: all hosts must save to one "
            "shared file system"
        )
    manifest.write(staging.path)
    staging.commit()


@overload
def find_checkpoint(folder: Path) -> tuple[Path, Manifest]: ...
@overload
def find_checkpoint(folder: Path, *, missing_ok: bool) -> tuple[Path, Manifest] | None: ...
def find_checkpoint(folder: Path, *, missing_ok: bool = False) -> tuple[Path, Manifest] | None:
    """Return the folder itself if it is a checkpoint, otherwise the newest whole checkpoint in it.

    Args:
        folder: the folder.
        missing_ok: whether to return None if the folder has no checkpoint at all.

    Raises:
        CheckpointError: if there is none, or none that is whole.
    """
    if is_checkpoint(folder):
        return folder, _read_whole(folder)
    if found := newest_checkpoint(folder):
        return found
    if (original := about_to_be_replaced(folder)) is not None:
        return original, _read_whole(original)
    if damaged := checkpoint_folders(folder):
        raise CheckpointError(
            f"no checkpoint in {folder} is whole: {', '.join(path.name for path in damaged)}; "
            "`meshwright inspect` says what is wrong"
        )
    if missing_ok:
        return None
    raise CheckpointError(f"there is no checkpoint in {folder}; name a folder that meshwright.save_checkpoint wrote")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has files of a checkpoint, whole or not."""
    try:
        names = os.listdir(folder)
    except OSError:  # a folder that cannot be read is not ours
        return False
    return any(name == NAME or _PART.fullmatch(name) for name in names)


def checkpoint_folders(parent: Path) -> list[Path]:
    """Return the checkpoints in a folder, whole or not, in the order of their names."""
    paths = sorted(parent.iterdir()) if parent.is_dir() else []
    return [p for p in paths if p.is_dir() and not p.is_symlink() and not is_hidden(p) and is_checkpoint(p)]


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
    """Remove the whole checkpoints of a folder, except the newest ``count`` and those that hold other files."""
    found = [(manifest.written, path) for path, manifest in _checkpoints(parent) if manifest is not None]
    whole = [(written, path) for written, path in found if _is_ours(path)]
    for _, path in sorted(whole)[:-count]:
        remove_folder(path)


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
    for path in [*checkpoint_folders(parent), *replaced_folders(parent)]:
        try:
            yield path, _read_whole(path)
        except CheckpointError:
            yield path, None


def _is_ours(folder: Path) -> bool:
    """Whether all that a folder holds are files of a checkpoint."""
    return folder.is_dir() and is_checkpoint(folder) and not foreign_files(folder)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1
