"""The manifest of a checkpoint, ``checkpoint.json``: everything but the tensors, and a digest of every other file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.digested_json import read_digested, write_digested
from meshwright.checkpoint.part_files import FileRecord, file_names
from meshwright.checkpoint.safetensors_file import DTYPES, MAX_DIMS
from meshwright.checkpoint.shares import Sizes
from meshwright.checkpoint.untrusted_json import LARGEST
from meshwright.errors import CheckpointError

NAME = "checkpoint.json"
FORMAT = "meshwright-checkpoint-1"
CONFIG_NAMES = ("config.json", "generation_config.json")

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        step: the number that the program gave the checkpoint; None if it gave none.
        written: when it was written, in nanoseconds since 1970.
        versions: the versions of the libraries that wrote it.
        plan: the fields of the ParallelPlan; None for a model that was not distributed.
        pp, dp, tp: the sizes of the mesh.
        tensors: the dtype and the one-device shape of each tensor, by its key.
        ties: the key that has the values of each weight with several names, by its other names.
        optimizer: the fields of an ``OptimizerManifest``; None without an optimizer.
        scheduler, scaler, loader, streams: the (encoded) states of these; None without one.
        extra: the program's own JSON.
        model_config: the texts of ``config.json`` and ``generation_config.json``, by these names; None for a model that
            has none.
        files: the record of each other file, by name.
    """

    step: int | None
    written: int
    versions: dict[str, str]
    plan: dict[str, Any] | None
    pp: int
    dp: int
    tp: int
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    ties: dict[str, str]
    optimizer: dict[str, Any] | None
    scheduler: Any
    scaler: Any
    loader: Any
    streams: dict[str, int] | None
    extra: Any
    model_config: dict[str, str] | None
    files: dict[str, FileRecord]

    @property
    def sizes(self) -> Sizes:
        """The sizes of the mesh."""
        return Sizes(pp=self.pp, dp=self.dp, tp=self.tp)

    def write(self, folder: Path) -> None:
        """Write the manifest of a folder, and flush it to the disk."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        record["tensors"] = {key: [_DTYPE_NAMES[dtype], list(shape)] for key, (dtype, shape) in self.tensors.items()}
        record["files"] = {name: asdict(file) for name, file in self.files.items()}
        write_digested(folder / NAME, "manifest", {"format": FORMAT, **record})

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read and check the manifest of a folder.

        Raises:
            CheckpointError: if it is missing, damaged, or of another format; it names what is wrong.
        """
        path = folder / NAME
        record = read_digested(path, "manifest")
        try:
            return _from_json(record)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not of the format {FORMAT}: {error}") from error


def _is(kind: Any) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 2**24


def _is_tensor(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and value[0] in DTYPES
        and isinstance(value[1], list)
        and len(value[1]) <= MAX_DIMS
        and all(map(_is_count, value[1]))
        and math.prod(max(size, 1) for size in value[1]) < LARGEST
    )


def _is_record(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"bytes", "digest"}
        and _is_count(value["bytes"])
        and isinstance(value["digest"], str)
    )


def _is_config(value: Any) -> bool:
    # Export writes files of these names.
    return isinstance(value, dict) and all(
        name in CONFIG_NAMES and isinstance(text, str) for name, text in value.items()
    )


def _table(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "format": lambda value: value == FORMAT,
    "step": _or_none(_is(int)),
    "written": _is_count,
    "versions": _table(_is(str)),
    "plan": _or_none(_is(dict)),
    "pp": _is_size,
    "dp": _is_size,
    "tp": _is_size,
    "tensors": _table(_is_tensor),
    "ties": _table(_is(str)),
    "optimizer": _or_none(_is(dict)),
    "scheduler": lambda value: True,
    "scaler": lambda value: True,
    "loader": _or_none(_is(dict)),
    "streams": _or_none(_table(_is_count)),
    "extra": lambda value: True,
    "model_config": _or_none(_is_config),
    "files": _table(_is_record),
}


def _from_json(record: Any) -> Manifest:
    if not isinstance(record, dict):
        raise ValueError("it is not a table")
    if unknown := sorted(record.keys() - _FIELDS.keys()):
        raise ValueError(f"it has unknown fields: {', '.join(unknown)}")
    if missing := sorted(_FIELDS.keys() - record.keys()):
        raise ValueError(f"it lacks {', '.join(missing)}")
    if wrong := [name for name, is_right in _FIELDS.items() if not is_right(record[name])]:
        raise ValueError(f"its field {wrong[0]!r} has a wrong value: {str(record[wrong[0]])[:100]}")
    del record["format"]
    places = range(record["pp"] * record["dp"] * record["tp"])
    # Names are made only if there are that many files, since a hostile manifest may claim a huge number of ranks.
    if len(record["files"]) != 2 * len(places) or record["files"].keys() != {
        name for place in places for name in file_names(place)
    }:
        raise ValueError(f"its files are not two for each of the {len(places)} ranks that wrote it")
    if lost := [tie for tie in record["ties"].values() if tie not in record["tensors"]]:
        raise ValueError(f"it has no tensor {lost[0]!r}")
    record["tensors"] = {key: (DTYPES[dtype], tuple(shape)) for key, (dtype, shape) in record["tensors"].items()}
    record["files"] = {name: FileRecord(**value) for name, value in record["files"].items()}
    return Manifest(**record)
