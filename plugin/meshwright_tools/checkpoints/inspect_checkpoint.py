"""Finds everything that is wrong in a checkpoint, without its model; also in those of the Trainer and of accelerate."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.files.place import Place
from meshwright.checkpoint.files.reading import digest, first_of, json_object, read_into, reading
from meshwright.checkpoint.files.storage import storage_of
from meshwright.checkpoint.format.checkpoint_folders import NAME, Manifest, foreign_files
from meshwright.checkpoint.format.load_weights import uncovered
from meshwright.checkpoint.format.object_states import check_random_state
from meshwright.checkpoint.format.part_files import CHUNK, FileRecord, PartIndex, check_header, file_names, tag_of
from meshwright.checkpoint.one_device.optimizer_manifest import OptimizerManifest, master_key, state_key
from meshwright.checkpoint.one_device.safetensors_file import memory_of, read_header
from meshwright.checkpoint.sealed import NAME as SEAL
from meshwright.checkpoint.sealed import Seal, damaged_chunks, in_order, sizes_in
from meshwright.errors import CheckpointError
from meshwright.layout.row_layout import numel
from meshwright.plan.text import format_plan
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


_STATE, _TRAINERS, _ACCELERATES = "trainer_state.json", "meshwright_progress.json", "meshwright.json"
_NUMBERED = re.compile(r"checkpoint[-_](\d+)")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "pytorch_model.bin")
_SHOWN = 20  # the most files or damages that the text lists


@dataclass(frozen=True, kw_only=True)
class ForeignInspection:
    """The content of a checkpoint of the Trainer or of accelerate.

    Args:
        folder: its folder.
        program: "Trainer" or "accelerate".
        step: its step; None if the program has not written it.
        plan: the fields of the plan under which it was saved; None without one.
        written: when it was sealed; None without a seal.
        files: the size in bytes of each file, by its path in the folder.
        damages: all that is wrong.
        is_compared: whether all bytes were compared with the digests of the seal.
    """

    folder: Path
    program: str
    step: int | None
    plan: Mapping[str, Any] | None
    written: str | None
    files: Mapping[str, int]
    damages: list[Damage]
    is_compared: bool

    @property
    def has_model(self) -> bool:
        """Whether ``from_pretrained`` reads the folder: it has weights and the config of their model."""
        configs = ("config.json", "adapter_config.json")
        return any(name in self.files for name in _WEIGHTS) and any(name in self.files for name in configs)


def program_of(folder: Path) -> str | None:
    """Return which program has saved a checkpoint to a folder: "Trainer" or "accelerate"; None if neither has."""
    if any((folder / name).is_file() for name in (_STATE, _TRAINERS)) and _has_weights(folder):
        return "Trainer"
    has_states = any(folder.glob("random_states_*.pkl"))
    return "accelerate" if has_states or (folder / _ACCELERATES).is_file() else None


def find_foreign(folder: Path) -> list[Path]:
    """Return the checkpoints of the Trainer or of accelerate in a folder, in the order of their saves.

    This is the folder itself, or the numbered ones in it and in ``checkpoints``, which accelerate makes.
    """
    if program_of(folder) is not None and _NUMBERED.fullmatch(folder.resolve().name):
        return [folder]
    parents = [path for path in (folder, folder / "checkpoints") if path.is_dir()]
    inside = [path for parent in parents for path in parent.iterdir() if _NUMBERED.fullmatch(path.name)]
    found = [path for path in inside if program_of(path) is not None]
    if not found and program_of(folder) is not None:
        return [folder]
    return in_order(found)


def inspect_foreign(folder: Path, *, reads_tensors: bool = True) -> ForeignInspection:
    """Look into a checkpoint of the Trainer or of accelerate.

    Args:
        folder: its folder.
        reads_tensors: whether to compare all bytes with the digests of the seal, instead of the sizes only.
    """
    program = program_of(folder) or "Trainer"
    progress = json_object(folder / (_TRAINERS if program == "Trainer" else _ACCELERATES))
    step = (
        json_object(folder / _STATE).get("global_step") if program == "Trainer" else first_of(progress, "shown_steps")
    )
    plan = progress.get("plan")
    damages: list[Damage] = []
    written, is_compared = None, False
    if (folder / SEAL).exists():
        try:
            seal = Seal.read(folder)
            written = datetime.fromtimestamp(seal.written / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
            problems = seal.problems(folder)
            if not problems and reads_tensors:
                problems, is_compared = damaged_chunks(folder, seal), True
        except (CheckpointError, OSError) as error:
            problems = [str(error)]
        damages = [Damage(file=SEAL, problem=problem.replace(f"{folder}/", "")) for problem in problems]
    elif progress:
        damages = [Damage(file=SEAL, problem=f"{SEAL} is missing: the save did not end, or an older version saved it")]
    try:
        files = dict(sorted(sizes_in(folder).items()))
    except CheckpointError:  # a link, which is reported above if there is a seal
        files = {path.name: path.lstat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    return ForeignInspection(
        folder=folder, program=program, step=step, plan=plan if isinstance(plan, dict) else None, written=written,
        files=files, damages=damages, is_compared=is_compared,
    )  # fmt: skip


def foreign_dict(found: ForeignInspection, others: list[Path] | None = None) -> dict[str, object]:
    """Return an inspection as JSON, with the names of the checkpoints beside it if there are any."""
    names: dict[str, object] = {} if not others else {"checkpoints": [path.name for path in others]}
    report = asdict(found) | {"folder": str(found.folder), "is_sealed": found.written is not None}
    return {**names, **report, "is_whole": not found.damages and (True if found.is_compared else None)}


def foreign_text(found: ForeignInspection, others: list[Path] | None = None) -> str:
    """Return an inspection as text."""
    lines = [] if not others else [f"{len(others)} checkpoints: {', '.join(path.name for path in others)}", ""]
    whose = f"of {'the Trainer' if found.program == 'Trainer' else 'accelerate'}"
    lines += [str(found.folder), "", f"{'checkpoint':<15} {whose}, {'sealed' if found.written else 'not sealed'}"]
    plan = "not distributed, or not known" if found.plan is None else format_plan(found.plan)
    rows = {"step": found.step, "written": found.written, "plan": plan}
    lines += [f"{name:<15} {'-' if value is None else value}" for name, value in rows.items()]
    lines += ["", f"{'file':<42} {'bytes':>17}"]
    lines += [f"{name:<42} {size:>17,}" for name, size in list(found.files.items())[:_SHOWN]]
    lines += [f"... and {len(found.files) - _SHOWN} more"] if len(found.files) > _SHOWN else []
    return "\n".join([*lines, "", *_verdict(found)])


def _verdict(found: ForeignInspection) -> list[str]:
    if found.damages:
        shown = [f"  {damage.problem}" for damage in found.damages[:_SHOWN]]
        return [f"DAMAGED: {len(found.damages)} thing(s) are wrong. Resume from another checkpoint.", *shown]
    reads = f"from_pretrained({str(found.folder)!r}) reads its weights as they are." if found.has_model else ""
    if found.is_compared:
        verdict = f"WHOLE: all {sum(found.files.values()):,} bytes are what was saved."
    elif found.written is not None:
        verdict = "Nothing is wrong with the names and sizes of the files. Their bytes were not read (--no-check)."
    else:
        verdict = "Not sealed by Meshwright, so there are no digests to compare the files with."
    return [verdict, *filter(None, [reads])]


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (*_WEIGHTS, SEAL))
