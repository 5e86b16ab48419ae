"""The seal of a checkpoint of other programs' files: ``meshwright_seal.json``, which lists every file in the folder."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.files import disk
from meshwright.checkpoint.files.lineage import FIELDS, LAST_TIME, UNNAMED, UNNUMBERED, Mark
from meshwright.checkpoint.files.reading import read_digested, write_digested
from meshwright.errors import CheckpointError
from meshwright.schema import LARGEST, boolean, equal, integer, listed, record, require, row, table, text, that

NAME = "meshwright_seal.json"
CHUNK = 64 * 2**20  # bytes under one digest, so that the ranks can share large files
_FORMAT = "meshwright-seal-1"


@dataclass(frozen=True, kw_only=True)
class Seal:
    """What a sealed folder holds.

    Args:
        number: its place in the order of its neighbours (see lineage.py).
        run: the run that it belongs to.
        launches: the runs of ``meshwright launch`` that saved it, one of each machine.
        written: when the folder was sealed by its host's clock, in nanoseconds since 1970; it decides nothing.
        is_open: whether programs may still be adding files, which are then not listed.
        files: the size of each file and the digest of each chunk of it, by its path in the folder.
    """

    # These come first in the file, where ``Mark.of`` reads them.
    number: int = UNNUMBERED
    run: str = UNNAMED
    launches: Sequence[str] = ()
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
        require(found, _SEAL, path)
        for name, (size, digests) in found["files"].items():
            found["files"][name] = (size, digests)
        del found["format"]
        return Seal(is_open=found.pop("open"), **found)

    def write(self, folder: Path) -> None:
        """Write the seal, or replace the one that the folder has in one step."""
        content = {"format": _FORMAT, **vars(self)}
        content["open"] = content.pop("is_open")
        disk.replace_file(folder / NAME, lambda path: write_digested(path, "seal", content))

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


def in_order(folders: Iterable[Path]) -> list[Path]:
    """Return folders with numbers in their names in the order of their saves.

    The seals have it. If a folder has none, because the stock program has saved it, the numbers of the names decide.
    """
    numbers = {folder: Mark.of(folder / NAME).number for folder in folders}
    are_sealed = all(numbers.values())
    return sorted(numbers, key=lambda folder: (numbers[folder] if are_sealed else 0, number_in(folder)))


def number_in(folder: Path) -> int:
    """Return the number at the end of a folder's name."""
    return int(re.split("[-_]", folder.name)[-1])


def holds_only_what_was_sealed(folder: Path) -> bool:
    """Return whether a folder has a seal, and no files but those that the seal lists."""
    try:
        return not (sizes_in(folder).keys() - Seal.read(folder).files)
    except CheckpointError:
        return False


def _is_inside(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half a character
        return False
    return len(name) < 4096 and "\0" not in name and not {"..", ""} & set(name.split("/"))


def _is_record(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and len(value[1]) == -(-max(value[0], 1) // CHUNK)


def _file(value: object, field: str) -> None:
    row(integer(0, LARGEST), listed(text("[0-9a-f]{32}")))(value, field)
    that(f"a size and a digest of each {CHUNK} bytes", _is_record)(value, field)


_NAME = that("a path inside the folder", _is_inside)
_SEAL = record(
    {"format": equal(_FORMAT), "written": integer(0, LAST_TIME), "open": boolean, "files": table(_file, names=_NAME)},
    {**FIELDS, "launches": listed(text("[0-9a-f]{32}"))},
)
