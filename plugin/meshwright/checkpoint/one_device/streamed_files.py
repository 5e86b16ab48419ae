"""Writes safetensors files one gathered tensor at a time, and replaces a model's files in one step.

Readers take ``model.safetensors`` before an index, and an index names its files. So new weights become valid by one
operation: renaming the single file or the index, or removing the single file beside a new index. Until then the files
of the old weights are not touched, and afterwards they are removed.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from meshwright.checkpoint.files import disk
from meshwright.checkpoint.files.disk import naming_the_disk
from meshwright.checkpoint.files.local_disk import StagedFolder
from meshwright.checkpoint.one_device.safetensors_file import Form, SafetensorsWriter, num_bytes
from meshwright.faults.together import on_first_rank, wait_for_first_rank
from meshwright.progress import Progress

Files = Mapping[str, Mapping[str, Form]]  # file name -> its tensors, in order

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(size: int | str) -> int:
    """Convert ``max_shard_size``, such as 500 or "5GB", to a number of bytes.

    Raises:
        ValueError: if ``size`` has another form.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f"max_shard_size={size!r} must be a number of bytes, or text with a unit such as '5GB'")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def split(stem: str, units: Iterable[Mapping[str, int]], most: int) -> dict[str, list[str]]:
    """Assign tensors to files in order, each of at most ``most`` bytes, as transformers does.

    Args:
        stem: the start of the files' names.
        units: the number of bytes of each tensor, by name. Tensors that share memory on one device are one unit, which
            is never divided; a larger one gets its own file.
        most: the number of bytes of the largest file.
    """
    parts: list[list[str]] = []
    last: list[str] = []
    room = most
    for unit in units:
        if (size := sum(unit.values())) > most:
            parts.append([*unit])
            continue
        if size > room:
            parts.append(last)
            last, room = [], most
        last += unit
        room -= size
    if last or not parts:
        parts.append(last)
    if len(parts) == 1:
        return {f"{stem}.safetensors": parts[0]}
    return {f"{stem}-{i:05d}-of-{len(parts):05d}.safetensors": names for i, names in enumerate(parts, 1)}


def index_of(files: Files, parameters: int) -> str:
    """Return the text of the index of several files, as ``save_pretrained`` writes it for a model's ``parameters``."""
    size = sum(num_bytes(form) for inside in files.values() for form in inside.values())
    metadata = {"total_parameters": parameters, "total_size": size}
    weight_map = {name: file for file, inside in files.items() for name in inside}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


class StreamedFiles:
    """The files on the writing rank. ``close`` raises the first error, since until then the other ranks are sending.

    Args:
        folder: the existing folder of the files.
        files: the tensors to be written in each file.
        title: the title of the progress bar.
    """

    def __init__(self, folder: Path, files: Files, title: str):
        self._folder, self._files = folder, files
        self._failure: OSError | None = None
        self._writer: SafetensorsWriter | None = None
        self._progress = Progress(title)
        forms = (form for forms in files.values() for form in forms.values())
        self._bytes = sum(map(num_bytes, forms))
        self._progress.start(self._bytes)

    def open(self, file: str) -> None:
        """Start the next file."""
        self._close()
        if self._failure is None:
            try:
                self._writer = SafetensorsWriter(self._folder / file, self._files[file])
            except OSError as error:
                self._failure = error

    def write(self, full: Tensor) -> None:
        """Append the next tensor of the file."""
        if self._writer is not None and self._failure is None:
            try:
                self._writer.write(full.cpu())
            except OSError as error:
                self._failure = error
            self._progress.add(full.nbytes)

    def close(self) -> None:
        """Close the last file.

        Raises:
            OSError: the first error of any step.
        """
        self._close()
        self._progress.close()
        if self._failure is not None:
            with naming_the_disk(self._folder, self._bytes):
                raise self._failure

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                self._failure = self._failure or error


_CARD = "README.md"  # a file that save_pretrained of a PEFT model updates


@dataclass(frozen=True)
class WeightNames:
    """The names of a model's weight files.

    Args:
        stem: the start of the names, such as "model".
        index: the name of the index of several files.
    """

    stem: str
    index: str

    @staticmethod
    def of(variant: str | None = None) -> WeightNames:
        """Return transformers' names of the weights of a variant."""
        middle = f".{variant}" if variant else ""
        return WeightNames(f"model{middle}", f"model.safetensors.index{middle}.json")

    @property
    def single(self) -> str:
        """The name of a single file with all weights."""
        return f"{self.stem}.safetensors"

    def is_shard(self, name: str) -> bool:
        """Return whether a name is one of several files."""
        return (
            re.fullmatch(rf"{re.escape(self.stem)}(-[0-9a-f]{{8}})?-\d{{5}}-of-\d{{5}}\.safetensors", name) is not None
        )


class ModelReplacement:
    """The hidden folder of one save inside the user's folder, on the rank that writes.

    ``path`` is the folder to write to.

    Args:
        target: the user's folder, which is created if it does not exist.
    """

    def __init__(self, target: Path):
        self.target = target
        self._staging = StagedFolder(target / "model", lambda _: True)
        self.path = self._staging.path
        if (target / _CARD).is_file():
            shutil.copyfile(target / _CARD, self.path / _CARD)

    def commit(self, names: WeightNames) -> None:
        """Give the files their places in the user's folder; remove the weights of an older save.

        Raises:
            OSError: if the disk fails; until the weights have changed, the old ones stay valid.
        """
        if (self.path / names.index).exists():
            self._rename_shards(names)
        files = sorted(path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file())
        for name in files:
            disk.sync_file(self.path / name)
        shards = [name for name in files if names.is_shard(name)]
        last = [name for name in (names.single, names.index) if name in files]
        others = sorted(set(files) - {*shards, *last}, key=lambda name: name.endswith(".safetensors"))
        try:
            for name in shards:
                self._move(name)
            disk.sync_folder(self.target)
            for name in others:
                if not _is_same(self.path / name, self.target / name):
                    self._move(name)
            for name in last:
                self._move(name)
        except OSError:
            for name in shards:
                with contextlib.suppress(OSError):
                    disk.remove(self.target / name)
            raise
        if names.index in last and (self.target / names.single).exists():
            disk.remove(self.target / names.single)
        disk.sync_folder(self.target)
        if last:
            self._remove_older(names, {*shards, *last})

    def close(self) -> None:
        """Remove the hidden folder, with what a failed save has left in it."""
        self._staging.close()

    def _move(self, name: str) -> None:
        if not (self.target / name).parent.is_dir():
            disk.make_folder((self.target / name).parent)
        disk.rename(self.path / name, self.target / name)

    def _rename_shards(self, names: WeightNames) -> None:
        """Give the new shards names that no file in the user's folder has, where they would replace one."""
        shards = [path.name for path in self.path.iterdir() if names.is_shard(path.name)]
        if not any((self.target / name).exists() for name in shards):
            return
        stem = f"{names.stem}-{uuid.uuid4().hex[:8]}"
        renamed = {name: stem + name.removeprefix(names.stem) for name in shards}
        for name, new in renamed.items():
            disk.rename(self.path / name, self.path / new)
        index = json.loads((self.path / names.index).read_text(encoding="utf-8"))
        index["weight_map"] = {tensor: renamed.get(file, file) for tensor, file in index["weight_map"].items()}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self.path / names.index).write_text(text, encoding="utf-8")

    def _remove_older(self, names: WeightNames, new: set[str]) -> None:
        found = [path for path in self.target.iterdir() if path.name == names.index or names.is_shard(path.name)]
        for path in sorted(found, key=lambda path: path.name != names.index):
            if path.name not in new:
                disk.remove(path)


def _is_same(new: Path, old: Path) -> bool:
    return old.is_file() and old.stat().st_size == new.stat().st_size and old.read_bytes() == new.read_bytes()


def stream(
    files: Files,
    gather: Callable[[str], Tensor | None],
    replacement: ModelReplacement | None,
    names: WeightNames,
    title: str,
    index: str | None = None,
) -> None:
    """Gather every tensor, write it, and replace a model's files; every rank must make the call.

    Args:
        files: the tensors of each file, the same on every rank.
        gather: a collective that returns the whole tensor on the rank that writes.
        replacement: the hidden folder; None on ranks that write nothing.
        names: the names of the weight files.
        title: the title of the progress bar.
        index: the text of the index of several files.
    """
    written = None if replacement is None else StreamedFiles(replacement.path, files, title)
    for file, inside in files.items():
        if written is not None:
            written.open(file)
        for name in inside:
            # In one expression, since a variable would keep this tensor in memory while the next one is gathered.
            _hand_over(gather(name), written)
            # Without this, ranks with nothing to send would wait in the last collective beyond its timeout.
            wait_for_first_rank()

    def finish() -> None:
        assert written is not None and replacement is not None
        written.close()
        if index is not None:
            (replacement.path / names.index).write_text(index, encoding="utf-8")
        replacement.commit(names)

    on_first_rank(finish)


def _hand_over(full: Tensor | None, written: StreamedFiles | None) -> None:
    if written is not None:
        assert full is not None
        written.write(full)
