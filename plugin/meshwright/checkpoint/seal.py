"""The seal of a checkpoint of other programs' files: ``meshwright_seal.json``, which lists every file in the folder."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint import disk
from meshwright.checkpoint.digested_json import read_digested, write_digested
from meshwright.errors import CheckpointError

NAME = "meshwright_seal.json"
CHUNK = 64 * 2**20  # bytes under one digest, so that the ranks can share large files
_FORMAT = "meshwright-seal-1"


@dataclass(frozen=True, kw_only=True)
class Seal:
    """What a sealed folder holds.

    Args:
        written: when the folder was sealed, in nanoseconds since 1970.
        is_open: whether programs may still be adding files, which are then not listed.
        files: the size of each file and the digest of each chunk of it, by its path in the folder.
    """

    written: int
    is_open: bool
    files: dict[str, tuple[int, list[str]]]

    @staticmethod
    def read(folder: Path) -> Seal:
        """Read the seal of a folder.

        Raises:
            CheckpointError: if it is missing or damaged.
        """
        path = folder / NAME
        found = read_digested(path, "seal")
        if not _is_seal(found):
            raise CheckpointError(f"{path} is not of the format {_FORMAT}")
        files = {name: (size, digests) for name, (size, digests) in found["files"].items()}
        return Seal(written=found["written"], is_open=found["open"], files=files)

    def write(self, folder: Path) -> None:
        """Write the seal, or replace the one that the folder has in one step."""
        content = {"format": _FORMAT, "written": self.written, "open": self.is_open, "files": self.files}
        staged = folder / f".{NAME}.new"
        staged.unlink(missing_ok=True)
        try:
            write_digested(staged, "seal", content)
            disk.rename(staged, folder / NAME)
        except OSError:
            with contextlib.suppress(OSError):
                staged.unlink(missing_ok=True)
            raise

    def problems(self, folder: Path) -> list[str]:
        """Return what the names and sizes of a folder's files show to be wrong, without reading the files."""
        try:
            present = sizes_in(folder)
        except (CheckpointError, OSError) as error:
            return [str(error)]
        found = [f"{folder / name} is missing" for name in self.files if name not in present]
        found += [
            f"{folder / name} has {present[name]} bytes, and {size} were saved"
            for name, (size, _) in self.files.items()
            if present.get(name, size) != size
        ]
        if not self.is_open:
            foreign = sorted(present.keys() - self.files)
            found += [f"{folder / name} is not a file of this checkpoint" for name in foreign]
        return found


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the size of each file in a folder and the folders in it, by its path; the seal is left out."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(root, name)
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise CheckpointError(f"{path} is a link or a device; a checkpoint holds ordinary files only")
            if stat.S_ISREG(mode):
                found[path.relative_to(folder).as_posix()] = path.lstat().st_size
    found.pop(NAME, None)
    found.pop(f".{NAME}.new", None)  # left by a process that was killed while it replaced the seal
    return found


def holds_only_what_was_sealed(folder: Path) -> bool:
    """Return whether a folder has a seal, and no files but those that the seal lists."""
    try:
        return not (sizes_in(folder).keys() - Seal.read(folder).files)
    except CheckpointError:
        return False


def _is_seal(value: Any) -> bool:
    def is_count(number: Any) -> bool:
        return type(number) is int and number >= 0

    def is_record(record: Any) -> bool:
        return (
            isinstance(record, list)
            and len(record) == 2
            and is_count(record[0])
            and isinstance(record[1], list)
            and len(record[1]) == len(range(0, max(record[0], 1), CHUNK))
            and all(isinstance(text, str) for text in record[1])
        )

    return (
        isinstance(value, dict)
        and value.keys() == {"format", "written", "open", "files"}
        and value["format"] == _FORMAT
        and is_count(value["written"])
        and type(value["open"]) is bool
        and isinstance(value["files"], dict)
        and all(not Path(name).is_absolute() and ".." not in Path(name).parts for name in value["files"])
        and all(map(is_record, value["files"].values()))
    )
