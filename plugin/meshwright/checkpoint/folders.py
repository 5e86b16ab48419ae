"""The checkpoints in a folder: which are whole, which is the newest, and which may go."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from meshwright.checkpoint.manifest import NAME, Manifest
from meshwright.checkpoint.staging import Staging, about_to_be_replaced, hidden_folders, remove_folder
from meshwright.errors import CheckpointError

logger = logging.getLogger(__name__)

_PART = re.compile(r"part-\d{5,}\.(safetensors|json)")


def stage(target: Path) -> Staging:
    """Start the save of a checkpoint, on the rank that commits it; checkpoints that are not whole are removed.

    Raises:
        CheckpointError: if ``target`` holds something that is not a checkpoint.
    """
    for path, manifest in list(_checkpoints(target.parent)):
        if manifest is None:
            logger.warning("%s is not a whole checkpoint and is removed", path)
            remove_folder(path)
    return Staging(target, _is_ours)


def commit(staging: Staging, manifest: Manifest) -> None:
    """Make a checkpoint visible: all files but the manifest are complete and on the disk.

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


def find_checkpoint(folder: Path) -> tuple[Path, Manifest]:
    """Return the checkpoint that a folder is, or the newest whole one in it.

    Raises:
        CheckpointError: if there is none, or the folder is one that is not whole.
    """
    if (folder / NAME).exists() or any(_parts(folder)):
        return folder, _read_whole(folder)
    if found := newest_checkpoint(folder):
        return found
    if (original := about_to_be_replaced(folder)) is not None:
        return original, _read_whole(original)
    raise CheckpointError(f"there is no checkpoint in {folder}; name a folder that meshwright.save_checkpoint wrote")


def newest_checkpoint(parent: Path) -> tuple[Path, Manifest] | None:
    """Return the checkpoint in a folder that was written last and is whole; None if there is none."""
    whole = []
    for path, manifest in _checkpoints(parent):
        if manifest is not None:
            whole.append((manifest.written, path, manifest))
        else:
            logger.warning("%s is not a whole checkpoint and is skipped; the next save removes it", path)
    return max(whole, key=lambda item: item[0])[1:] if whole else None


def keep_newest(parent: Path, count: int) -> None:
    """Remove all checkpoints of a folder but the newest ``count``."""
    whole = [(manifest.written, path) for path, manifest in _checkpoints(parent) if manifest is not None]
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
    hidden = {path for path, _, _ in hidden_folders(parent)}
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if path.is_dir() and not path.is_symlink() and path not in hidden and _is_ours(path):
            try:
                yield path, _read_whole(path)
            except CheckpointError:
                yield path, None


def _is_ours(folder: Path) -> bool:
    """Whether all that a folder holds are files of a checkpoint."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return bool(names) and all(name == NAME or _PART.fullmatch(name) for name in names)


def _parts(folder: Path) -> Iterator[Path]:
    return (path for path in (folder.iterdir() if folder.is_dir() else ()) if _PART.fullmatch(path.name))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1
