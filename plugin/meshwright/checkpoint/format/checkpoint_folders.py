"""The checkpoints in a folder: which are whole, which is the newest, and which may be removed."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import overload

from meshwright.checkpoint.files.lineage import Lineage, Mark, begin_save
from meshwright.checkpoint.files.place import Place
from meshwright.checkpoint.files.staged_folder import LATE, is_hidden, seen_in_time
from meshwright.checkpoint.files.storage import Staging, storage_of
from meshwright.checkpoint.format.manifest import NAME, Manifest
from meshwright.checkpoint.format.part_files import PART
from meshwright.errors import CheckpointError, RemoteError
from meshwright.printable import printable

logger = logging.getLogger(__name__)


def stage(target: Place) -> Staging:
    """Start the save of a checkpoint, on the rank that commits it.

    Raises:
        CheckpointError: if ``target`` holds something that is not a checkpoint.
    """
    staging = storage_of(target).stage(target, _is_ours, NAME)
    begin_save(staging.target / NAME)
    return staging


def commit(staging: Staging, manifest: Manifest, lineage: Lineage) -> Manifest:
    """Make a checkpoint visible, once all of its files but the manifest are complete and on the disk.

    Returns:
        The manifest with its number and its run.

    Raises:
        CheckpointError: if a file of another rank is not there, or another program has saved to the folder meanwhile.
        OSError: if the disk fails; the folder then has what it had before.
    """
    if not seen_in_time(lambda: not absent_files(staging.path, manifest), staging.path):
        raise CheckpointError(
            f"rank 0 did not see all files that another rank wrote to {staging.path} within {LATE:g} s: all hosts must "
            "save to one shared file system"
        )
    with storage_of(staging.target).locked(staging.target.parent):
        neighbours = (path / NAME for path in _all_folders(staging.target.parent))
        mark = lineage.next(staging.target / NAME, neighbours)
        manifest = replace(manifest, number=mark.number, run=mark.run)
        manifest.write(staging.path)
        staging.commit()
    return manifest


@overload
def find_checkpoint(folder: Place) -> tuple[Place, Manifest]: ...
@overload
def find_checkpoint(folder: Place, *, missing_ok: bool) -> tuple[Place, Manifest] | None: ...
def find_checkpoint(folder: Place, *, missing_ok: bool = False) -> tuple[Place, Manifest] | None:
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
    if (original := storage_of(folder).replaced(folder.parent).get(folder.name)) is not None:
        return original, _read_whole(original)
    if damaged := checkpoint_folders(folder):
        raise CheckpointError(
            f"no checkpoint in {folder} is whole: {', '.join(path.name for path in damaged)}; "
            "`meshwright inspect` says what is wrong"
        )
    if missing_ok:
        return None
    raise CheckpointError(f"there is no checkpoint in {folder}; {_instead(folder)}")


def _instead(folder: Place) -> str:
    """Return what to write in place of a folder without a checkpoint."""
    names = storage_of(folder).entries(folder)
    if any(PART.fullmatch(name) for name in names):
        return "its save did not end. Name another folder, or the one around it, for the newest whole checkpoint"
    if "trainer_state.json" in names:
        return "it is a Trainer's: write trainer.train(resume_from_checkpoint=...)"
    if any(name.endswith(".safetensors") for name in names):
        return (
            "it has weights alone, without an optimizer; load them into the model before to_distributed: "
            f"from_pretrained({str(folder)!r})"
        )
    return "name a folder that meshwright.save_checkpoint wrote"


def is_checkpoint(folder: Place) -> bool:
    """Whether a folder has files of a checkpoint, whole or not, whose save has ended."""
    storage = storage_of(folder)
    try:
        names = storage.entries(folder)
    except RemoteError:
        raise
    except OSError:  # a folder that cannot be read is not ours
        return False
    return NAME in names or (storage.hides_saves and any(PART.fullmatch(name) for name in names))


def checkpoint_folders(parent: Place) -> list[Place]:
    """Return the checkpoints in a folder, whole or not, in the order of their names."""
    found = sorted(storage_of(parent).entries(parent).items())
    return [
        parent / name
        for name, entry in found
        if entry.is_folder and not is_hidden(name) and is_checkpoint(parent / name)
    ]


def foreign_files(folder: Place) -> list[str]:
    """Return the names in a folder that are not those of a checkpoint's files."""
    return sorted(name for name in storage_of(folder).entries(folder) if name != NAME and not PART.fullmatch(name))


def newest_checkpoint(parent: Place) -> tuple[Place, Manifest] | None:
    """Return the checkpoint in a folder that was saved last and is whole; None if there is none.

    If the folder has checkpoints of several runs, a warning names the newest one of each.
    """
    marks = {path: Mark.of(path / NAME) for path in _all_folders(parent)}
    newest: tuple[Place, Manifest] | None = None
    for path in sorted(marks, key=lambda path: -marks[path].number):
        # Those of older versions have no number, and neither have those whose first bytes are damaged.
        if newest is not None and marks[path].number:
            continue
        try:
            manifest = _read_whole(path)
        except CheckpointError:
            logger.warning(
                "%s is not a whole checkpoint and is skipped; `meshwright inspect` says what is wrong", printable(path)
            )
            continue
        if newest is None or manifest.order > newest[1].order:
            newest = path, manifest
    if newest is not None:
        runs: dict[str, Place] = {}
        for path in sorted(marks, key=lambda path: marks[path].number):
            runs[marks[path].run] = path
        if others := [str(path) for run, path in runs.items() if run != newest[1].run]:
            logger.warning(
                "%s has checkpoints of %d runs. The one that was saved last is taken, %s. To go on with another run, "
                "name its checkpoint instead: %s",
                printable(parent), len(others) + 1, printable(newest[0]), printable(", ".join(others[:5])),
            )  # fmt: skip
    return newest


def keep_newest(parent: Place, count: int, run: str) -> None:
    """Remove the whole checkpoints of a run from a folder, except its newest ``count`` and those with other files."""
    try:
        _remove_oldest(parent, count, run)
    except RemoteError as error:
        logger.warning("older checkpoints in %s could not be removed (%s). The new one is complete", parent, error)


def _remove_oldest(parent: Place, count: int, run: str) -> None:
    whole = []
    for path in _all_folders(parent):
        if Mark.of(path / NAME).run != run:
            continue  # another job's, which is not even read
        try:
            manifest = _read_whole(path)
        except CheckpointError:
            continue
        if manifest.run == run and _is_ours(path):
            whole.append((manifest.order, path))
    for _, path in sorted(whole)[:-count]:
        storage_of(path).remove_folder(path, NAME)


def absent_files(folder: Place, manifest: Manifest) -> list[str]:
    """Return the files of a checkpoint that are missing or of another size."""
    found = storage_of(folder).entries(folder)
    return [name for name, record in manifest.files.items() if name not in found or found[name].size != record.bytes]


def _read_whole(folder: Place) -> Manifest:
    manifest = Manifest.read(folder)
    if absent := absent_files(folder, manifest):
        raise CheckpointError(
            f"{folder} is not whole: {len(absent)} file(s) are missing or have another size than when they were saved: "
            f"{', '.join(absent[:5])}; load another checkpoint"
        )
    return manifest


def _all_folders(parent: Place) -> list[Place]:
    return [*checkpoint_folders(parent), *storage_of(parent).replaced(parent).values()]


def _is_ours(folder: Place) -> bool:
    """Whether a folder has files, and all of them are those of a checkpoint."""
    return bool(storage_of(folder).entries(folder)) and not foreign_files(folder)
