"""Writes safetensors files that do not fit in memory, one gathered tensor at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from meshwright.checkpoint.files.full_disk import naming_the_disk
from meshwright.checkpoint.one_device.safetensors_file import Form, SafetensorsWriter, num_bytes
from meshwright.faults.together import wait_for_first_rank
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


def stream(files: Files, gather: Callable[[str], Tensor | None], written: StreamedFiles | None) -> None:
    """Gather every tensor and write it; every rank must make the call.

    Args:
        files: the tensors of each file, the same on every rank.
        gather: a collective that returns the whole tensor on the rank that writes.
        written: the files to write; None on ranks that write nothing.
    """
    for file, names in files.items():
        if written is not None:
            written.open(file)
        for name in names:
            # In one expression, since a variable would keep this tensor in memory while the next one is gathered.
            _hand_over(gather(name), written)
            # Without this, ranks with nothing to send would wait in the last collective beyond its timeout.
            wait_for_first_rank()


def _hand_over(full: Tensor | None, written: StreamedFiles | None) -> None:
    if written is not None:
        assert full is not None
        written.write(full)
