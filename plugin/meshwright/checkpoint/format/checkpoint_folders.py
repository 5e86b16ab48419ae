"""The checkpoints in a folder, and the manifest ``checkpoint.json`` that each of them has."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, overload

import torch

from meshwright.checkpoint.files.local_disk import LATE, is_hidden, seen_in_time
from meshwright.checkpoint.files.place import Place, place
from meshwright.checkpoint.files.reading import (
    FIELDS,
    LAST_TIME,
    UNNAMED,
    UNNUMBERED,
    Lineage,
    Mark,
    begin_save,
    parse_json,
    read_digested,
    write_digested,
)
from meshwright.checkpoint.files.storage import Staging, storage_of
from meshwright.checkpoint.format.part_files import PART, FileRecord, file_names, tag_of
from meshwright.checkpoint.one_device.optimizer_manifest import ENCODED, OPTIMIZER
from meshwright.checkpoint.one_device.safetensors_file import DTYPES, SHAPE
from meshwright.errors import CheckpointError, RemoteError
from meshwright.outside_files import (
    LARGEST,
    Check,
    anything,
    integer,
    maybe,
    one_of,
    record,
    require,
    row,
    table,
    text,
    that,
)
from meshwright.outside_files import NAME as KEY
from meshwright.parallel.dropout_streams import STREAMS
from meshwright.printable import printable

NAME = "checkpoint.json"
OPTIMIZER_NAME = "optimizer.json"  # the manifest of a folder that has an optimizer's state alone
FORMAT = "meshwright-checkpoint-2"
_FORMAT_3 = "meshwright-checkpoint-3"  # the same, with a tag in the names of the files
_FORMAT_1 = "meshwright-checkpoint-1"  # which has the sizes of these axes as fields, and is read for ever
_AXES_1 = ("pp", "dp", "tp")
CONFIG_NAMES = ("config.json", "generation_config.json")

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        number: its place in the order of its neighbours (see reading.py).
        run: the run that it belongs to.
        step: the number that the program gave the checkpoint; None if it gave none.
        written: when it was written by its host's clock, in nanoseconds since 1970; it decides nothing.
        versions: the versions of the libraries that wrote it.
        plan: the fields of the ParallelPlan; None for a model that was not distributed.
        ranks: the number of ranks that saved it, each of which wrote two files.
        mesh: the sizes of the axes over which the ranks were arranged, by name. The tensors are found without it.
        tensors: the dtype and the one-device shape of each tensor, by its key.
        ties: the key that has the values of each weight with several names, by its other names.
        optimizer: the fields of an ``OptimizerManifest``; None without an optimizer.
        scheduler, scaler, loader, streams: the (encoded) states of these; None without one.
        extra: the program's own JSON.
        model_config: the texts of ``config.json`` and ``generation_config.json``, by these names; None for a model that
            has none.
        files: the record of each other file, by name.
    """

    # These come first in the file, where ``Mark.of`` reads them.
    number: int = UNNUMBERED
    run: str = UNNAMED
    step: int | None
    written: int
    versions: dict[str, str]
    plan: dict[str, object] | None
    ranks: int
    mesh: dict[str, int]
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    ties: dict[str, str]
    optimizer: dict[str, Any] | None
    scheduler: object
    scaler: object
    loader: Any
    streams: dict[str, int] | None
    extra: object
    model_config: dict[str, str] | None
    files: dict[str, FileRecord]

    def write(self, path: Place) -> None:
        """Write the manifest to a new file, and flush it to the disk."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        found["tensors"] = {key: [_DTYPE_NAMES[dtype], list(shape)] for key, (dtype, shape) in self.tensors.items()}
        found["files"] = {name: asdict(file) for name, file in self.files.items()}
        write_digested(path, "manifest", {"format": _FORMAT_3 if tag_of(self.files) else FORMAT, **found})

    @property
    def order(self) -> tuple[int, int]:
        """The key that sorts checkpoints of one folder; those of older versions, which have no number, come first."""
        return self.number, self.written

    @staticmethod
    def read(folder: Place, name: str = NAME) -> Manifest:
        """Read and check the manifest of a folder, which has the name ``name``.

        Raises:
            CheckpointError: if it is missing, damaged, or of another format; it names what is wrong.
        """
        return _from_json(read_digested(folder / name, "manifest", allowance=_allowance(folder)), folder / name)


def _allowance(folder: Place) -> int:
    """Return how much memory the manifest may take beyond that of a usual one: a 16th of what the folder's files hold.

    So a model of very many parameters can be saved, and a few bytes of a hostile checkpoint cannot take much memory.
    """
    with contextlib.suppress(OSError):
        return sum(entry.held for entry in storage_of(folder).entries(folder).values()) // 16
    return 0


_SIZE = integer(1, 2**24)


def _is_config(value: object) -> bool:
    # Export writes it, and reads some of its fields.
    try:
        return isinstance(value, str) and isinstance(parse_json(bytearray(value.encode()), place(NAME)), dict)
    except (CheckpointError, UnicodeEncodeError):
        return False


def _mesh(value: object, field: str) -> None:
    table(_SIZE, names=KEY)(value, field)
    that("the sizes of at most 64 axes", lambda sizes: len(sizes) <= 64)(value, field)


_FIELDS: Mapping[str, Check] = {
    "step": maybe(integer()),
    "written": integer(0, LAST_TIME),
    "versions": table(text(most=200)),
    "plan": maybe(table(anything)),
    "tensors": table(row(one_of(DTYPES), SHAPE)),
    "ties": table(KEY),
    "optimizer": maybe(OPTIMIZER),
    "scheduler": ENCODED,
    "scaler": ENCODED,
    "loader": maybe(table(anything)),  # which the loader checks
    "streams": maybe(STREAMS),
    "extra": anything,
    "model_config": maybe(record({}, dict.fromkeys(CONFIG_NAMES, that("the text of a table", _is_config)))),
    "files": table(record({"bytes": integer(0, LARGEST), "digest": text("[0-9a-f]{32}")})),
}
_CHECKS = {
    **dict.fromkeys(
        (FORMAT, _FORMAT_3), record({"format": anything, "ranks": _SIZE, "mesh": _mesh, **_FIELDS}, FIELDS)
    ),
    _FORMAT_1: record({"format": anything, **dict.fromkeys(_AXES_1, _SIZE), **_FIELDS}, FIELDS),
}


def _from_json(found: Any, path: Place) -> Manifest:
    require(found, table(anything), path)
    require(found.get("format"), one_of(_CHECKS), f"{path}: its 'format'")
    require(found, _CHECKS[found["format"]], path)
    if is_first := found.pop("format") == _FORMAT_1:
        found["mesh"] = {axis: found.pop(axis) for axis in _AXES_1}
        found["ranks"] = math.prod(found["mesh"].values())
    # Names are made only if there are that many files, since a hostile manifest may claim a huge number of ranks.
    ranks, files = found["ranks"], found["files"]
    tag = tag_of(files)
    if len(files) != 2 * ranks or files.keys() != {name for place in range(ranks) for name in file_names(place, tag)}:
        sizes = ", ".join(f"{axis!r}={found['mesh'][axis]}" for axis in _AXES_1) if is_first else f"'ranks'={ranks}"
        raise CheckpointError(
            f"{path} is damaged: its 'files' are not two for each of the {ranks} ranks of {sizes}; load another "
            "checkpoint"
        )
    if lost := [tie for tie in found["ties"].values() if tie not in found["tensors"]]:
        raise CheckpointError(f"{path} is damaged: its 'ties' name {lost[0]!r}, which is not in 'tensors'")
    for key, (dtype, shape) in found["tensors"].items():  # in place: two tables would take twice the memory
        found["tensors"][key] = (DTYPES[dtype], tuple(shape))
    found["files"] = {name: FileRecord(**value) for name, value in found["files"].items()}
    return Manifest(**found)


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
    wait_for_files(staging.path, manifest)
    with storage_of(staging.target).locked(staging.target.parent):
        neighbours = (path / NAME for path in _all_folders(staging.target.parent))
        mark = lineage.next(staging.target / NAME, neighbours)
        manifest = replace(manifest, number=mark.number, run=mark.run)
        manifest.write(staging.path / NAME)
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
    if OPTIMIZER_NAME in names:
        return "it has an optimizer's state alone: meshwright.load_optimizer(model, optimizer, folder)"
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
    has_parts = any(part is not None and not part["tag"] for part in map(PART.fullmatch, names))  # an optimizer's have
    return NAME in names or (storage.hides_saves and has_parts)


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


def wait_for_files(folder: Place, manifest: Manifest) -> None:
    """Wait until rank 0 sees the files of all ranks.

    Raises:
        CheckpointError: if a file of another rank is not there.
    """
    if not seen_in_time(lambda: not absent_files(folder, manifest), folder):
        raise CheckpointError(
            f"rank 0 did not see all files that another rank wrote to {folder} within {LATE:g} s: all hosts must save "
            "to one shared file system"
        )


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
