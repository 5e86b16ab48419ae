"""Export the weights of a checkpoint as the one-device files that ``from_pretrained`` and ``load_weights`` read."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.checkpoint.files import disk
from meshwright.checkpoint.files.disk import naming_the_disk
from meshwright.checkpoint.files.local_disk import StagedFolder
from meshwright.checkpoint.files.place import Place, Url, local_path, place
from meshwright.checkpoint.format.checkpoint_folders import checkpoint_folders, find_checkpoint, is_checkpoint
from meshwright.checkpoint.format.load_weights import CheckpointWeights, OpenCheckpoint
from meshwright.checkpoint.format.rank_state import ties_weights, with_dtype
from meshwright.checkpoint.one_device.safetensors_file import Form, SafetensorsWriter, num_bytes
from meshwright.checkpoint.one_device.streamed_files import index_of, parse_bytes, split
from meshwright.errors import CheckpointError
from meshwright_tools.checkpoints.inspect_checkpoint import find_foreign, inspect_foreign

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Export:
    """What an export has written.

    Args:
        folder: the folder of the files.
        checkpoint: the folder of the checkpoint.
        step: its step; None if it has none.
        files: the size of each file in bytes, by name.
    """

    folder: Path
    checkpoint: Place
    step: int | None
    files: dict[str, int]


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Export:
    """Write the weights of a checkpoint under the model's own names, in one process and without the model.

    At most one tensor is in memory at a time. ``out`` gets all files at once, or stays as it was.

    Args:
        checkpoint: the folder of a checkpoint, or a folder of checkpoints, which stands for the newest whole one.
        out: the folder that is written; it must not exist or be empty.
        max_shard_size: the size of a file in bytes, or with a unit; a larger tensor gets its own file.
        dtype: the dtype to which floating-point weights are converted; None keeps them.
        overwrite: whether to replace an earlier export in ``out``; everything in its folder is removed.

    Raises:
        CheckpointError: if the checkpoint is not whole, or ``out`` holds something else.
        OSError: if the disk fails; ``out`` is then what it was before.
    """
    most = parse_bytes(max_shard_size)
    target = local_path(out, "export")
    _check_source(place(checkpoint))
    source = find_checkpoint(place(checkpoint))[0]
    weights = CheckpointWeights.of(OpenCheckpoint.read(source))
    _check_target(target, source, overwrite)
    config = dict(weights.opened.manifest.model_config or {})
    forms = _forms(weights, dtype, has_ties="config.json" in config and ties_weights(config["config.json"]))
    if "config.json" in config and (common := _common_dtype(forms)) is not None:
        config["config.json"] = with_dtype(config["config.json"], common)
    with naming_the_disk(target, sum(map(num_bytes, forms.values()))):
        staging = StagedFolder(target, lambda _: True)
        try:
            _write_weights(staging.path, forms, weights, most)
            for name, text in config.items():
                disk.write_file(staging.path / name, text.encode())
            files = {path.name: path.stat().st_size for path in sorted(staging.path.iterdir())}
            staging.commit()
        finally:
            staging.close()
    return Export(folder=target, checkpoint=source, step=weights.opened.manifest.step, files=files)


def _check_source(source: Place) -> None:
    """Raise for a checkpoint of the Trainer or of accelerate, whose weights are one-device files already."""
    if isinstance(source, Url) or is_checkpoint(source) or checkpoint_folders(source):
        return
    if not (folders := find_foreign(source)):
        return
    newest = inspect_foreign(folders[-1], reads_tensors=False)
    how = f"AutoModelForCausalLM.from_pretrained({str(newest.folder)!r})"
    if not newest.has_model:
        how = f"meshwright.load_weights(model, {str(newest.folder)!r}), since it has no config.json"
    raise CheckpointError(
        f"{newest.folder} is a checkpoint of {'the Trainer' if newest.program == 'Trainer' else 'accelerate'}, whose "
        f"weights are one-device files already, so there is nothing to export. Read it with {how}"
    )


def _check_target(target: Path, source: Place, overwrite: bool) -> None:
    """Check that what is in ``target`` may be replaced."""
    if isinstance(source, Path) and (
        target.resolve().is_relative_to(source.resolve()) or source.resolve().is_relative_to(target.resolve())
    ):
        raise CheckpointError(f"{target} and the checkpoint {source} are one folder, or one is inside the other")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file; name a folder")
    if not overwrite:
        raise CheckpointError(f"{target} is not empty; name another folder, or pass --overwrite to replace it")
    names = {path.name for path in target.iterdir()}
    if not names & {"model.safetensors", _INDEX} or any(path.is_dir() for path in target.iterdir()):
        raise CheckpointError(
            f"{target} holds something else than a model's files, and --overwrite would remove it; name another folder"
        )


def _forms(weights: CheckpointWeights, dtype: torch.dtype | None, *, has_ties: bool) -> dict[str, Form]:
    """The dtype and shape of each tensor that is written, wide dtypes first, so that each is aligned in its file."""
    first: dict[str, str] = {}
    forms: dict[str, Form] = {}
    for name, (_, entry) in weights.entries.items():
        if first.setdefault(weights.keys[name], name) == name or not has_ties:
            forms[name] = (dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype, entry.shape)
    return dict(sorted(forms.items(), key=lambda item: -item[1][0].itemsize))


def _common_dtype(forms: dict[str, Form]) -> str | None:
    """The dtype that holds all floating-point weights exactly: ``from_pretrained`` converts all to one dtype."""
    found = {dtype for dtype, _ in forms.values() if dtype.is_floating_point and dtype.itemsize > 1}
    return str(functools.reduce(torch.promote_types, found)).removeprefix("torch.") if found else None


def _write_weights(folder: Path, forms: dict[str, Form], weights: CheckpointWeights, most: int) -> None:
    names = split("model", ({name: num_bytes(form)} for name, form in forms.items()), most)
    files = {file: {name: forms[name] for name in inside} for file, inside in names.items()}
    with weights.progress as progress:
        progress.title = f"exporting {weights.source.name}"
        progress.start(sum(weights.entries[name][1].num_bytes for name in forms))
        for file, inside in files.items():
            with SafetensorsWriter(folder / file, inside) as writer:
                for name in inside:
                    writer.write(weights.read(name, forms[name][0]))
    if len(files) > 1:
        disk.write_file(folder / _INDEX, index_of(files, sum(math.prod(shape) for _, shape in forms.values())).encode())
