"""A checkpoint of whole weights in safetensors files, with the statistics of packed weights as bitsandbytes names them.

A weight of 4 bits, ``layer.weight``, has ``layer.weight.absmax``, ``layer.weight.quant_map``, the same of the absmax if
it is quantised too, and its shape and kinds as text. One of 8 bits has ``layer.SCB``, a number for each row.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint.files.place import Place, Url, place
from meshwright.checkpoint.files.reading import read_json, reading
from meshwright.checkpoint.files.storage import storage_of
from meshwright.checkpoint.one_device.safetensors_file import (
    Entry,
    Form,
    is_a_pickle,
    num_bytes,
    read_header,
    read_rows,
)
from meshwright.errors import CheckpointError
from meshwright.layout.packed_weights import PackedMatrix, packed_without_values, state_without_packed
from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import TensorLayout, global_shape
from meshwright.outside_files import require, table, text
from meshwright.progress import Progress

logger = logging.getLogger(__name__)

# A .safetensors file, an index of several, a directory with either, or the files themselves.
WeightSource = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_SINGLE = "model.safetensors"
_WEIGHT_MAP = table(text(most=4096))
_INDEX = ".safetensors.index.json"
_COMPARED = 2**26  # bytes of a tensor that are compared at a time


@dataclass(frozen=True)
class WeightFiles:
    """The files of a checkpoint, and which of them holds which tensor.

    Args:
        source: the path that the user named.
        entries: the file of each tensor, by name, and the tensor's place in it.
        progress: the progress bar, which counts the bytes read.
    """

    source: Place
    entries: Mapping[str, tuple[Place, Entry]]
    progress: Progress

    @staticmethod
    def open(source: WeightSource) -> WeightFiles:
        """Find the files and read their headers.

        Args:
            source: a .safetensors file, an index of several, a directory with either, or the files themselves.

        Raises:
            CheckpointError: if a file or tensor is missing, damaged, or of another format; the message says which.
        """
        if not isinstance(source, str | os.PathLike):
            return _of_files([WeightFiles.open(file) for file in source])
        path = place(source)
        inside = storage_of(path).entries(path)
        if inside or (isinstance(path, Path) and path.is_dir()):
            path = _in_directory(path, sorted(inside))
            _check_inside(path.parent, path.name)
        if _suffix(path.name) in _PICKLES:
            raise CheckpointError(is_a_pickle(path))
        if isinstance(path, Path) and not path.is_file():
            raise CheckpointError(f"there is no checkpoint at {path}; name a .safetensors file, its index, or a folder")
        if _suffix(path.name) == ".json":
            entries = _indexed(path)
        else:
            entries = {name: (path, entry) for name, entry in read_header(path).items()}
        return WeightFiles(place(source), entries, Progress(f"reading {path.name}"))

    def names_for(self, model: nn.Module) -> dict[int, str]:
        """Check the checkpoint against a model; return the checkpoint's name of each model tensor, by ``id``.

        The checkpoint may have a tied parameter under any of its names. Buffers that the checkpoint lacks are left out.

        Raises:
            CheckpointError: if parameters are missing, tensors have another shape, or a tied parameter has other values
                under another name; the message lists them.
        """
        found: dict[int, str] = {}
        missing: dict[int, str] = {}
        others = []
        packed = packed_without_values(model)
        state = state_without_packed(model) | packed
        for name, tensor in state.items():
            if name in self.entries:
                entry = self.entries[name][1]
                dtype, shape = entry.dtype, entry.shape
                if entry.unreadable:
                    others.append(f"{name}: {entry.unreadable} in the checkpoint, a dtype that cannot be read here")
                elif dtype != tensor.dtype and (name in packed or dtype.itemsize == 1):  # whose scales the model lacks
                    others.append(f"{name}: quantised to {dtype} in the checkpoint, {tensor.dtype} in the model")
                elif shape != tuple(global_shape(tensor)):
                    others.append(f"{name}: {list(shape)} in the checkpoint, {list(global_shape(tensor))} in the model")
                found.setdefault(id(tensor), name)
            elif isinstance(tensor, nn.Parameter):
                missing.setdefault(id(tensor), name)
        lacking = [name for key, name in missing.items() if key not in found]
        if lacking or others:
            raise CheckpointError(self._mismatch(lacking, others))
        if apart := self.untied(model):
            name, first = next(iter(apart.items()))
            raise CheckpointError(
                f"{self.source} has {name} with other values than {first}, but the model ties the two, so one of them "
                "would be lost. Build the model with config.tie_word_embeddings=False, or load it with "
                "from_pretrained(path, distributed_config=...), which keeps both"
            )
        known = {*state, *(model.state_dict() if packed else ())}  # with the statistics of packed weights
        if unused := [name for name in self.entries if name not in known]:
            logger.warning("%s has %d tensor(s) that the model lacks: %s", self.source, len(unused), some(unused, ", "))
        return found

    def untied(self, model: nn.Module) -> dict[str, str]:
        """Return the second names of a model's tied tensors that have other values in the files, each with the first.

        The values are compared in the model's dtype, as transformers does.
        """
        firsts: dict[int, str] = {}
        found: dict[str, str] = {}
        for name, tensor in state_without_packed(model).items():
            if name in self.entries:
                first = firsts.setdefault(id(tensor), name)
                if first != name and not self.are_equal(first, name, tensor.dtype):
                    found[name] = first
        return found

    def are_equal(self, one: str, other: str, dtype: torch.dtype) -> bool:
        """Return whether two tensors have the same values in a dtype; of both, a part at a time is in memory."""
        shape = self.entries[one][1].shape
        if shape != self.entries[other][1].shape:
            return False
        files = dataclasses.replace(self, progress=Progress(f"comparing {one} and {other}"))
        rows = RowLayout.padded(shape[0] if shape else 1, 1 + num_bytes((dtype, shape)) // _COMPARED)
        layout = TensorLayout(shape=torch.Size(shape), cuts=(("part", rows),) if shape else ())
        parts = (dataclasses.replace(layout, place={"part": part}) for part in range(len(rows.spans)))
        return all(torch.equal(files.read(one, dtype, part), files.read(other, dtype, part)) for part in parts)

    def form(self, name: str) -> Form | None:
        """Return the dtype and the shape of a tensor; None if the files do not have it."""
        found = self.entries.get(name)
        return found and (found[1].dtype, found[1].shape)

    def read(self, name: str, dtype: torch.dtype, layout: TensorLayout | None = None) -> Tensor:
        """Read what this rank has of a tensor, and no other bytes, to the CPU; all of it without a layout."""
        path, entry = self.entries[name]
        with reading(path, follows_links=True) as reader:
            return read_rows(reader, entry, layout or entry.layout, dtype, self.progress.add)

    def _mismatch(self, lacking: list[str], others: list[str]) -> str:
        parts = [f"{self.source} does not fit the model"]
        if lacking:
            parts.append(f"it lacks {len(lacking)} parameter(s):\n  {some(lacking)}")
        if others:
            parts.append(f"{len(others)} tensor(s) have another shape or form:\n  {some(others)}")
        return "\n".join(parts)


def _of_files(parts: list[WeightFiles]) -> WeightFiles:
    if len(parts) == 1:
        return parts[0]
    entries: dict[str, tuple[Place, Entry]] = {}
    for part in parts:
        if repeated := sorted(entries.keys() & part.entries.keys()):
            other = entries[repeated[0]][0]
            raise CheckpointError(f"{other} and {part.source} both hold {some(repeated, ', ')}; name one of them")
        entries |= part.entries
    if not parts:
        raise CheckpointError("there is no checkpoint in an empty list of files")
    folder = parts[0].source.parent
    return WeightFiles(folder, entries, Progress(f"reading {folder.name}"))


def _in_directory(directory: Place, names: list[str]) -> Place:
    if _SINGLE in names:
        return directory / _SINGLE
    for kind in (_INDEX, ".safetensors"):
        found = [name for name in names if name.endswith(kind)]
        if len(found) == 1:
            return directory / found[0]
        if found:
            raise CheckpointError(f"{directory} has several checkpoints: {', '.join(found)}; name one of the files")
    pickles = [name for name in names if _suffix(name) in _PICKLES]
    hint = (
        f"; {', '.join(pickles)} looks like a pickle file, which is not read because loading it could run code: write "
        "it again with model.save_pretrained(...), which writes safetensors"
        if pickles
        else ""
    )
    raise CheckpointError(f"{directory} has no .safetensors file; it holds: {some(names, ', ') or 'nothing'}{hint}")


def _suffix(name: str) -> str:
    return PurePath(name).suffix


def _indexed(index: Place) -> dict[str, tuple[Place, Entry]]:
    found = read_json(index.resolve() if isinstance(index, Path) else index)
    files = found.get("weight_map") if isinstance(found, dict) else None
    require(files, _WEIGHT_MAP, f"{index}: its 'weight_map'")
    assert files is not None
    if outside := sorted({file for file in files.values() if Path(file).name != file or "\0" in file}):
        raise CheckpointError(f"the 'weight_map' of {index} lists files outside its own folder: {some(outside, ', ')}")
    if absent := sorted({*files.values()} - storage_of(index).entries(index.parent).keys()):
        raise CheckpointError(f"the 'weight_map' of {index} lists files that do not exist: {some(absent, ', ')}")
    for file in sorted(set(files.values())):
        _check_inside(index.parent, file)
    headers = {file: read_header(index.parent / file) for file in sorted(set(files.values()))}
    if lost := [f"{name} in {file}" for name, file in files.items() if name not in headers[file]]:
        raise CheckpointError(f"{index} lists tensors that their files do not hold:\n  {some(lost)}")
    return {name: (index.parent / file, headers[file][name]) for name, file in files.items()}


def _check_inside(folder: Place, file: str) -> None:
    """Check that a file of the disk is in its folder, and no link to a file elsewhere.

    The cache of the Hugging Face hub links a snapshot's files to the ``blobs`` folder beside the snapshots.
    """
    if isinstance(folder, Url):
        return  # a store has no links
    home, real = folder.resolve(), (folder / file).resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(home) for home in homes):
        raise CheckpointError(
            f"{folder / file} is a link to {real}, outside its folder; name that file itself, or a list of files, if "
            "you trust the link"
        )


def some(names: list[str], separator: str = "\n  ") -> str:
    """Return the first 20 of some names or lines, and the number of the others."""
    more = [f"... and {len(names) - 20} more"] if len(names) > 20 else []
    return separator.join([*names[:20], *more])


_TEXTS = "quant_state.bitsandbytes__"


def read_statistics(files: WeightFiles, name: str, module: Any, packing: PackedMatrix, device: torch.device) -> Any:
    """Read the statistics of a whole weight, as the library keeps them: a tensor for 8 bits, an object for 4.

    Args:
        files: the checkpoint.
        name: the name of the weight in it.
        module: the module that has the weight.
        packing: how the weight is stored.
        device: the device on which the rank keeps them.

    Raises:
        CheckpointError: if the checkpoint has none, or they are those of another weight.
    """
    if packing.block == 1:
        scales = f"{name.removesuffix('weight')}SCB"
        _require(files, name, scales in files.entries, f"no {scales}")
        is_for_rows = files.entries[scales][1].shape == packing.shape[:1]
        _require(files, name, is_for_rows, f"no number for each row in {scales}")
        return files.read(scales, torch.float32).to(device)
    entries = _beside(files, name)
    _require(files, name, any(key.startswith(_TEXTS) for key in entries), f"no {name}.{_TEXTS}*")
    tensors = {key: files.read(f"{name}.{key}", entry.dtype) for key, entry in entries.items()}
    try:
        state = type(module.weight.quant_state).from_dict(tensors, device)
        blocks = -(-packing.shape.numel() // state.blocksize)
        fits = state.shape == packing.shape and state.absmax.numel() == blocks and isinstance(state.dtype, torch.dtype)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{files.source}: the statistics of {name} cannot be read: {error!r}") from error
    _require(files, name, fits, f"the shape {list(packing.shape)} in the model, and {list(state.shape)} in its text")
    _require(files, name, state.blocksize == packing.block, f"blocks of {state.blocksize} values, not {packing.block}")
    return state


def _beside(files: WeightFiles, name: str) -> dict[str, Entry]:
    prefix = f"{name}."
    return {key.removeprefix(prefix): entry for key, (_, entry) in files.entries.items() if key.startswith(prefix)}


def _require(files: WeightFiles, name: str, fits: bool, what: str) -> None:
    if not fits:
        raise CheckpointError(f"{files.source}: {name} is packed in the model, but has {what}")
