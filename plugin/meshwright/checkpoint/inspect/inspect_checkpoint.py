"""Look into a checkpoint without its model, and find everything that is wrong; loading stops at the first problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from meshwright.checkpoint.files.place import Place
from meshwright.checkpoint.files.reading import digest, read_into, reading
from meshwright.checkpoint.files.storage import storage_of
from meshwright.checkpoint.format.checkpoint_folders import foreign_files
from meshwright.checkpoint.format.manifest import NAME, Manifest
from meshwright.checkpoint.format.open_checkpoint import uncovered
from meshwright.checkpoint.format.part_files import CHUNK, FileRecord, PartIndex, check_header, file_names, tag_of
from meshwright.checkpoint.format.random_state import check_random_state
from meshwright.checkpoint.one_device.optimizer_manifest import OptimizerManifest, master_key, state_key
from meshwright.checkpoint.one_device.safetensors_file import memory_of, read_header
from meshwright.errors import CheckpointError
from meshwright.layout.blocks import numel
from meshwright.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Something that is wrong with a checkpoint.

    Args:
        file: the name of the file.
        problem: what is wrong, as a sentence.
        tensor: the key of the tensor that is concerned, if it is a single one.
        byte, bytes: the start and the length of the damaged range in the file; None if the damage has no place in it.
    """

    file: str
    problem: str
    tensor: str | None = None
    byte: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The content of a checkpoint, and everything that is wrong with it.

    Args:
        folder: its folder.
        manifest: its manifest; None if that is damaged.
        random: the kinds of random states that a rank has.
        files: the size in bytes of each file in the folder, by name.
        damages: all that is wrong.
        bytes_read: the number of bytes of tensors that were compared with their digests; None if none were to be.
    """

    folder: Place
    manifest: Manifest | None
    random: list[str]
    files: dict[str, int]
    damages: list[Damage]
    bytes_read: int | None


def inspect_checkpoint(folder: Place, *, reads_tensors: bool = True) -> Inspection:
    """Look into a checkpoint.

    Args:
        folder: the folder of one checkpoint.
        reads_tensors: whether to compare all bytes of tensors with their digests, instead of the manifest, the indexes
            and the headers only.
    """
    files = {name: entry.size for name, entry in sorted(storage_of(folder).entries(folder).items())}
    damages = [
        Damage(file=name, problem="is not a file of a checkpoint; keep=n does not remove a folder that has one")
        for name in foreign_files(folder)
    ]
    done = 0 if reads_tensors else None
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        damages.append(Damage(file=NAME, problem=_without_path(error, folder / NAME)))
        return Inspection(folder=folder, manifest=None, random=[], files=files, damages=damages, bytes_read=done)
    surplus = sorted(files.keys() - manifest.files.keys() - {NAME} - {damage.file for damage in damages})
    damages += [Damage(file=name, problem=f"is not a file of this checkpoint, according to {NAME}") for name in surplus]
    parts = []
    for place in range(manifest.ranks):
        part, found = _part(folder, place, manifest)
        damages += found
        parts += [part] if part is not None else []
    if len(parts) == manifest.ranks:  # otherwise a missing part explains the missing elements
        damages += _uncovered(manifest, parts)
    damages += _inconsistencies(manifest)
    if reads_tensors:
        done, found = _read_all(folder, manifest, parts, files)
        damages += found
    random = sorted({kind for part in parts if isinstance(part.random, dict) for kind in part.random})
    return Inspection(folder=folder, manifest=manifest, random=random, files=files, damages=damages, bytes_read=done)


def _without_path(error: CheckpointError, path: Place) -> str:
    return str(error).removeprefix(f"cannot read {path}: ").removeprefix(f"{path} ").removeprefix("is damaged: ")


def _part(folder: Place, place: int, manifest: Manifest) -> tuple[PartIndex | None, list[Damage]]:
    """The index of one rank, if it can be read, and what is wrong with it and with the header of the tensor file."""
    name, index_name = file_names(place, tag_of(manifest.files))
    damages = []
    part = None
    try:
        part = PartIndex.without_header(folder, place, manifest.files)
        check_random_state(part.random, torch.device("cpu"), index_name)
    except CheckpointError as error:
        damages.append(Damage(file=index_name, problem=_without_path(error, folder / index_name)))
    try:
        check_header(folder / name, manifest.files[name])
    except CheckpointError as error:
        damages.append(Damage(file=name, problem=_without_path(error, folder / name)))
    else:
        damages += _disagreements(part, manifest, manifest.files[name]) if part is not None else []
    return part, damages


def _disagreements(part: PartIndex, manifest: Manifest, record: FileRecord) -> Iterator[Damage]:
    """Yield the differences between the header of a tensor file and its index."""
    name = part.path.name
    try:
        entries = read_header(part.path)
    except CheckpointError as error:
        yield Damage(file=name, problem=_without_path(error, part.path))
        return
    for key in sorted(entries.keys() | part.pieces.keys()):
        if key not in manifest.tensors:
            yield Damage(file=name, tensor=key, problem=f"has {key}, which {NAME} does not list")
        elif key not in part.pieces:
            yield Damage(file=name, tensor=key, problem=f"has {key} in its header, but not in its index")
        elif key not in entries:
            yield Damage(file=name, tensor=key, problem=f"has {key} in its index, but not in its header")
        else:
            entry, piece, dtype = entries[key], part.pieces[key], manifest.tensors[key][0]
            saved, shown = (dtype, (numel(piece.blocks),), piece.start), (entry.dtype, entry.shape, entry.start)
            if saved != shown:
                problem = f"has {_form(*shown)} of {key} in its header, but {_form(*saved)} in its index"
                yield Damage(file=name, tensor=key, byte=piece.start, problem=problem)
            if not piece.has_digests(dtype):
                problem = f"has {len(piece.digests)} digests of {key} in its index, not one per {CHUNK} bytes"
                yield Damage(file=name, tensor=key, problem=problem)
    ends = sorted((entry.start, entry.start + entry.num_bytes, key) for key, entry in entries.items())
    for (_, stop, key), (start, _, other) in pairwise(ends):
        if start != stop:
            yield Damage(file=name, tensor=other, byte=start, problem=f"has {other} where {key} is, or beyond a gap")


def _form(dtype: torch.dtype, shape: tuple[int, ...], start: int) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} from byte {start} on"


def _uncovered(manifest: Manifest, parts: list[PartIndex]) -> Iterator[Damage]:
    """Yield the tensors that have elements in no file, or in several."""
    for key, problem in uncovered(manifest, parts):
        yield Damage(file=NAME, tensor=key, problem=f"has {key}, of which {problem}")


def _inconsistencies(manifest: Manifest) -> Iterator[Damage]:
    """Yield what is wrong with the states in the manifest."""
    if manifest.optimizer is None:
        return
    described = OptimizerManifest(**manifest.optimizer)
    expected = [state_key(name, key) for name, keys in described.tensors.items() for key in keys]
    for key in (*expected, *map(master_key, described.masters)):
        if key not in manifest.tensors:
            yield Damage(file=NAME, tensor=key, problem=f"lists no tensor {key}, which belongs to its optimizer")


def _read_all(
    folder: Place, manifest: Manifest, parts: list[PartIndex], files: Mapping[str, int]
) -> tuple[int, list[Damage]]:
    """Read all tensors; return the number of bytes, and where they are not what was saved."""
    damages: list[Damage] = []
    with Progress(f"checking {folder.name}") as progress:
        known = [[(key, manifest.tensors[key][0]) for key in part.pieces if key in manifest.tensors] for part in parts]
        progress.start(
            sum(
                numel(part.pieces[key].blocks) * dtype.itemsize
                for part, keys in zip(parts, known, strict=True)
                for key, dtype in keys
            )
        )
        for part, keys in zip(parts, known, strict=True):
            if part.path.name not in files:
                continue  # which is reported already
            for key, dtype in sorted(keys, key=lambda item: part.pieces[item[0]].start):
                if part.pieces[key].has_digests(dtype):
                    damages += _joined(_bad_chunks(part, key, dtype, files[part.path.name], progress.add))
        return progress.done, damages


def _bad_chunks(
    part: PartIndex, key: str, dtype: torch.dtype, size: int, on_read: Callable[[int], None]
) -> Iterator[Damage]:
    piece = part.pieces[key]
    staging = torch.empty(min(CHUNK // dtype.itemsize, numel(piece.blocks)), dtype=dtype)
    for start, stop, expected in piece.chunks(dtype):
        memory = memory_of(staging[: stop - start])
        byte = piece.start + start * dtype.itemsize
        problem = None
        try:
            with reading(part.path) as reader:
                read_into(reader, byte, memory)
        except CheckpointError as error:
            is_cut = size < byte + len(memory)
            problem = f"{key} is cut off" if is_cut else f"{key} cannot be read: {_without_path(error, part.path)}"
        else:
            if digest(memory) != expected:
                problem = f"{key} is not what was saved"
        on_read(len(memory))
        if problem is not None:
            yield Damage(file=part.path.name, tensor=key, byte=byte, bytes=len(memory), problem=problem)


def _joined(damages: Iterator[Damage]) -> list[Damage]:
    """Damages of one tensor, with those of neighbouring chunks as one."""
    found: list[Damage] = []
    for damage in damages:
        last = found[-1] if found else None
        if last is not None and (last.byte or 0) + (last.bytes or 0) == damage.byte and last.problem == damage.problem:
            found[-1] = Damage(
                file=last.file, tensor=last.tensor, byte=last.byte, bytes=(last.bytes or 0) + (damage.bytes or 0),
                problem=last.problem,
            )  # fmt: skip
        else:
            found.append(damage)
    return found
