"""Checkpoints of other programs' files: a folder that exists whole or not at all, with a seal,
``meshwright_seal.json``, that lists its files.

The seal has the size and the digests of every file in the folder. It is written last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from meshwright.checkpoint.files import disk
from meshwright.checkpoint.files.disk import naming_the_disk
from meshwright.checkpoint.files.local_disk import (
    StagedFolder,
    locked,
    remove_visible_folder,
    restore_replaced,
    seen_in_time,
    staged_path,
)
from meshwright.checkpoint.files.place import read_same
from meshwright.checkpoint.files.reading import (
    FIELDS,
    LAST_TIME,
    UNNAMED,
    UNNUMBERED,
    Lineage,
    Mark,
    begin_save,
    digest_in,
    read_digested,
    read_into,
    reading,
    write_digested,
)
from meshwright.errors import CheckpointError, PeerFailedError
from meshwright.faults.together import on_first_rank, raise_if_any, succeed_together, texts_of_all
from meshwright.outside_files import LARGEST, boolean, equal, integer, listed, record, require, row, table, text, that

logger = logging.getLogger(__name__)

NAME = "meshwright_seal.json"
CHUNK = 64 * 2**20  # bytes under one digest, so that the ranks can share large files
_FORMAT = "meshwright-seal-1"


@dataclass(frozen=True, kw_only=True)
class Seal:
    """What a sealed folder holds.

    Args:
        number: its place in the order of its neighbours (see reading.py).
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


@dataclass(frozen=True, kw_only=True)
class SealedFolders:
    """The checkpoints in one folder whose names have a number at their end; some may be the stock program's.

    Args:
        parent: the folder.
        name: the name of a checkpoint; the number is its last part.
    """

    parent: Path
    name: re.Pattern[str]

    def newest_first(self, launches: Collection[str] = ()) -> list[Path]:
        """Return those of any or of these launches, the one that was saved last first."""
        if not self.parent.is_dir():
            return []
        restore_replaced(self.parent)
        found = [path for path in self.parent.iterdir() if self.name.fullmatch(path.name) and path.is_dir()]
        if launches:
            found = [path for path in found if (seal := _seal_of(path)) and not {*seal.launches}.isdisjoint(launches)]
        return in_order(found)[::-1]

    def newest_whole(
        self, check: Callable[[Path], None], launches: Collection[str] = ()
    ) -> tuple[Path | None, list[str]]:
        """Return the newest whole one of any or of these launches, and what is wrong with those that are skipped.

        Args:
            check: function that raises a ``CheckpointError`` on every rank alike if a folder is not whole.
            launches: the launches.
        """
        skipped: list[str] = []
        for name in on_first_rank(lambda: [path.name for path in self.newest_first(launches)]):
            folder = self.parent / name
            try:
                check(folder)
            except CheckpointError as error:
                skipped.append(f"{folder}: {error}")
                on_first_rank(functools.partial(logger.warning, "%s is skipped: %s", folder, str(error)))
                continue
            return folder, skipped
        return None, skipped

    def remove_oldest(self, limit: int, run: str, why: str, protected: Collection[str] = ()) -> None:
        """Remove the oldest checkpoints of a run beyond ``limit``, those that are not whole first.

        Args:
            limit: how many stay.
            run: the run; those of the stock program belong to no run, and count as this run's.
            why: the name of the option, for the log.
            protected: the paths of checkpoints that are never removed.
        """
        own = [path for path in self.newest_first() if Mark.of(path / NAME).run in (run, UNNAMED)]
        own.sort(key=_age)
        kept = {os.path.abspath(path) for path in protected}
        removable = [path for path in own if os.path.abspath(path) not in kept]
        for path in removable[: max(len(own) - max(limit, len(kept)), 0)]:
            logger.info("removing the older checkpoint %s because of %s", path, why)
            remove_visible_folder(path)


def _seal_of(folder: Path) -> Seal | None:
    try:
        return Seal.read(folder)
    except CheckpointError:
        return None


def _age(folder: Path) -> tuple[bool, int, int]:
    """Return a key that sorts checkpoints: those that are not whole, then by the order in which they were saved."""
    if (seal := _seal_of(folder)) is not None:
        return not seal.problems(folder), seal.number, number_in(folder)
    return not (folder / NAME).exists(), UNNUMBERED, number_in(folder)  # without a seal, the stock program's


def holds_only_what_was_sealed(folder: Path) -> bool:
    """Return whether a folder has a seal, and no files but those that the seal lists."""
    return (seal := _seal_of(folder)) is not None and not (sizes_in(folder).keys() - seal.files)


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


_READ = 2**20


@contextlib.contextmanager
def sealed_folder(
    target: Path,
    *,
    lineage: Lineage,
    launch: str = "",
    is_ours: Callable[[Path], bool] | None = None,
    is_open: bool = False,
) -> Iterator[Path]:
    """Yield a hidden folder that gets the name ``target`` when the block ends; every rank must enter it.

    An error on any rank is raised on every rank, and ``target`` then is what it was before. In the block, an error
    must not leave other ranks in a collective.

    Args:
        target: the folder that is made, or replaced.
        lineage: the run.
        launch: the launch that has started this rank; empty without one.
        is_ours: function that returns whether a folder may be replaced; None for folders with a seal and no other
            files than the sealed ones.
        is_open: whether programs will add files to the folder, until :func:`close_seal`.

    Raises:
        CheckpointError: if ``target`` holds other files, another program has saved to it meanwhile, or hosts do not
            share the disk.
        OSError: if a rank cannot write.
    """
    staging: StagedFolder | None = None

    def start() -> str:
        nonlocal staging
        with naming_the_disk(target):
            staging = StagedFolder(target, is_ours or holds_only_what_was_sealed)
            begin_save(staging.target / NAME)
        return staging.name

    def commit(files: dict[str, tuple[int, list[str]]]) -> None:
        assert staging is not None
        for path in staging.path.rglob("*"):
            if path.is_dir():
                disk.sync_folder(path)
        with naming_the_disk(target), locked(staging.target.parent):
            neighbours = (path / NAME for path in staging.target.parent.iterdir())
            mark = lineage.next(staging.target / NAME, neighbours)
            Seal(
                number=mark.number,
                run=mark.run,
                launches=launches,
                written=min(time.time_ns(), LAST_TIME),
                is_open=is_open,
                files=files,
            ).write(staging.path)
            staging.commit()
        if is_open:
            _TIMES[staging.target] = _times(staging.target)

    try:
        hidden = on_first_rank(start)
        path = succeed_together(lambda: staged_path(target, hidden))
        failure: Exception | None = None
        try:
            with naming_the_disk(target):
                yield path
        except (PeerFailedError, dist.DistError):
            raise
        except Exception as error:
            failure = error
        succeed_together(lambda: raise_if_any(failure))
        launches = sorted({*texts_of_all(launch)} - {""})
        files = _digested(path, on_first_rank(lambda: sorted(sizes_in(path).items())))
        on_first_rank(lambda: commit(files))
    finally:
        if staging is not None:
            staging.close()


def close_seal(folder: Path) -> None:
    """Bring the seal of an open folder up to date with what programs have added and changed, and close it.

    Every rank must make the call. A folder that has been removed is left alone.
    """
    found = on_first_rank(lambda: _changes(folder))
    if found is None:
        return
    sizes, unchanged = found
    files = {name: record for name, record in unchanged.items() if name in sizes}
    files |= _digested(folder, sorted((name, size) for name, size in sizes.items() if name not in files))

    def replace() -> None:
        dataclasses.replace(Seal.read(folder), is_open=False, files=files).write(folder)
        disk.sync_folder(folder)

    on_first_rank(replace)


def _changes(folder: Path) -> tuple[dict[str, int], dict[str, tuple[int, list[str]]]] | None:
    """Return the sizes of a folder's files, and the records of those that were not changed since the seal."""
    if not folder.is_dir():
        return None
    seal, sizes, times = Seal.read(folder), sizes_in(folder), _times(folder)
    before = _TIMES.pop(folder.resolve(), {})
    return sizes, {
        name: record
        for name, record in seal.files.items()
        if sizes.get(name) == record[0] and times.get(name) == before.get(name, "")
    }


# When each file of an open folder was written, to find those that change. They are compared for equality only: the
# clock may go back in between.
_TIMES: dict[Path, dict[str, tuple[int, int]]] = {}


def _times(folder: Path) -> dict[str, tuple[int, int]]:
    found = ((name, (folder / name).lstat()) for name in sizes_in(folder))
    return {name: (status.st_mtime_ns, status.st_ino) for name, status in found}


def check_seal(folder: Path) -> None:
    """Check that every file of a sealed folder is what was saved; every rank must make the call, and reads a share.

    Raises:
        CheckpointError: on every rank, if files are missing, truncated, changed, renamed or foreign; it names the
            first of them.
    """

    def compare() -> tuple[None, str]:
        seal = Seal.read(folder)
        if problems := seal.problems(folder) or damaged_chunks(folder, seal):
            shown = "; ".join(problems[:5] + ([f"and {len(problems) - 5} more"] if len(problems) > 5 else []))
            raise CheckpointError(f"{folder} is not whole: {shown}. Load another checkpoint")
        return None, digest_in(folder / NAME)

    read_same(folder, compare)


def damaged_chunks(folder: Path, seal: Seal) -> list[str]:
    """Return what is wrong with the bytes of a sealed folder's files; each rank reads its share of them."""
    shared = _share([(name, size) for name, (size, _) in sorted(seal.files.items())])
    return [
        f"{folder / name} is damaged: its bytes from {start} on are not what was saved"
        for name, start, stop in shared
        if _digest_of(folder / name, start, stop) != seal.files[name][1][start // CHUNK]
    ]


def _digested(folder: Path, sizes: list[tuple[str, int]]) -> dict[str, tuple[int, list[str]]]:
    """Flush files of a folder to the disk and digest them, each rank a share."""

    def own() -> dict[str, dict[int, str]]:
        digests: dict[str, dict[int, str]] = {}
        for name, start, stop in _share(sizes):
            if not seen_in_time((folder / name).exists, folder):
                raise CheckpointError(
                    f"a rank does not see {folder / name}, which rank 0 sees: all hosts must save to one shared file "
                    "system"
                )
            if start == 0:
                disk.sync_file(folder / name)
            digests.setdefault(name, {})[start] = _digest_of(folder / name, start, stop)
        return digests

    texts = texts_of_all(json.dumps(succeed_together(own)))
    found: dict[str, dict[int, str]] = {name: {} for name, _ in sizes}
    for answer in texts:
        for name, digests in json.loads(answer).items():
            found[name] |= {int(start): value for start, value in digests.items()}
    return {name: (size, [found[name][start] for start in sorted(found[name])]) for name, size in sizes}


def _share(sizes: list[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Return this rank's share of all chunks: a contiguous run of them."""
    chunks = [
        (name, start, min(start + CHUNK, size)) for name, size in sizes for start in range(0, max(size, 1), CHUNK)
    ]
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    total = sum(stop - start for _, start, stop in chunks)
    own, passed = [], 0
    for name, start, stop in chunks:
        if min(passed * ranks // max(total, 1), ranks - 1) == rank:
            own.append((name, start, stop))
        passed += stop - start
    return own


def _digest_of(path: Path, start: int, stop: int) -> str:
    import xxhash  # what writes and reads no checkpoint runs without it

    hasher = xxhash.xxh3_128()
    memory = memoryview(bytearray(min(_READ, stop - start)))
    with reading(path, until=stop) as reader:
        while start < stop:
            part = memory[: stop - start]
            read_into(reader, start, part)
            hasher.update(part)
            start += len(part)
    return hasher.hexdigest()
