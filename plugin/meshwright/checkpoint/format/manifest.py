"""The manifest of a checkpoint, ``checkpoint.json``: everything but the tensors, and a digest of every other file."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from meshwright.checkpoint.files.lineage import FIELDS, LAST_TIME, UNNAMED, UNNUMBERED
from meshwright.checkpoint.files.place import Place, place
from meshwright.checkpoint.files.reading import parse_json, read_digested, write_digested
from meshwright.checkpoint.files.storage import storage_of
from meshwright.checkpoint.format.part_files import FileRecord, file_names, tag_of
from meshwright.checkpoint.one_device.optimizer_manifest import ENCODED, OPTIMIZER
from meshwright.checkpoint.one_device.safetensors_file import DTYPES, SHAPE
from meshwright.errors import CheckpointError
from meshwright.parallel.dropout_streams import STREAMS
from meshwright.schema import LARGEST, Check, anything, integer, maybe, one_of, record, require, row, table, text, that
from meshwright.schema import NAME as KEY

NAME = "checkpoint.json"
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
        number: its place in the order of its neighbours (see lineage.py).
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

    def write(self, folder: Place) -> None:
        """Write the manifest of a folder, and flush it to the disk."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        found["tensors"] = {key: [_DTYPE_NAMES[dtype], list(shape)] for key, (dtype, shape) in self.tensors.items()}
        found["files"] = {name: asdict(file) for name, file in self.files.items()}
        write_digested(folder / NAME, "manifest", {"format": _FORMAT_3 if tag_of(self.files) else FORMAT, **found})

    @property
    def order(self) -> tuple[int, int]:
        """The key that sorts checkpoints of one folder; those of older versions, which have no number, come first."""
        return self.number, self.written

    @staticmethod
    def read(folder: Place) -> Manifest:
        """Read and check the manifest of a folder.

        Raises:
            CheckpointError: if it is missing, damaged, or of another format; it names what is wrong.
        """
        return _from_json(read_digested(folder / NAME, "manifest", allowance=_allowance(folder)), folder / NAME)


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
