"""Writes the optimizer's state in one-device form, which load_optimizer.py reads under any plan.

The folder has safetensors files with whole tensors, and the manifest ``optimizer.json`` with all else. Each save writes
files with new names, and then replaces the manifest, which lists them, in one step. A crash at any time therefore
leaves the last complete save.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint.files import disk
from meshwright.checkpoint.files.place import local_path
from meshwright.checkpoint.one_device.optimizer_manifest import OptimizerManifest
from meshwright.checkpoint.one_device.rank_optimizer import RankOptimizer
from meshwright.checkpoint.one_device.safetensors_file import num_bytes
from meshwright.checkpoint.one_device.streamed_files import StreamedFiles, parse_bytes, split, stream
from meshwright.checkpoint.one_device.whole_tensors import assemble
from meshwright.compiling import without_compilation
from meshwright.errors import PlanError
from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.together import exchange_together, on_first_rank, succeed_together
from meshwright.mesh.axes import Mesh
from meshwright.optim.runtime import device_of
from meshwright.progress import is_first_rank

_FILE = re.compile(r"optimizer-[0-9a-f]{8}(-\d{5}-of-\d{5})?\.safetensors")


@on_every_rank
def save_optimizer(
    model: nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str], *, max_shard_size: int | str = "5GB"
) -> None:
    """Write an optimizer's state in one-device form; every rank must make the call.

    The save has the state of each parameter under its one-device name, the options of the parameter groups and, if ZeRO
    keeps them, float32 master weights. Rank 0 writes, and never holds more than one full tensor beside its own shard.
    To save the model's weights, call ``model.save_pretrained``.

    Args:
        model: the optimizer's model, distributed or not.
        optimizer: the optimizer, as ``to_distributed`` or ``shard_optimizer`` returned it.
        directory: the folder, created if it does not exist; an earlier save in it is replaced only once the new one is
            complete.
        max_shard_size: maximum size of one file, as a number of bytes or as text with a unit.

    Raises:
        OptimizerMismatchError: if the optimizer belongs to another model.
        CheckpointError: if a state value is neither a tensor nor a number.
        OSError: on every rank, if rank 0 cannot write; the folder then holds what it held before.

    Example::

        model.save_pretrained("checkpoint")
        mw.save_optimizer(model, optimizer, "checkpoint/optimizer")
    """
    model = without_compilation(model, "save_optimizer(model, optimizer, directory)")
    folder = local_path(directory, "save_optimizer")
    own, texts = exchange_together(lambda: ((own := RankOptimizer.of(model, optimizer)), own.text()))
    mesh = own.found.runtime.mesh
    succeed_together(lambda: _check_writer(mesh))
    every = own.with_all(texts)
    tensors = every.tensors(device_of(model))
    most = succeed_together(lambda: parse_bytes(max_shard_size))
    stem = on_first_rank(lambda: _new_stem(folder))
    sizes = {name: num_bytes(tensor.form) for name, tensor in tensors.items()}
    names = {
        file: names
        for file, names in split(stem, ({name: size} for name, size in sizes.items()), most).items()
        if names
    }
    files = {file: {name: tensors[name].form for name in names} for file, names in names.items()}
    manifest = every.manifest({name: file for file, forms in files.items() for name in forms})

    def gather(name: str) -> Tensor | None:
        return assemble(tensors[name].values().reshape(-1), tensors[name].layout, mesh)

    is_writer = mesh.is_first and is_first_rank()
    written = StreamedFiles(folder, files, f"writing {folder}") if is_writer else None
    stream(files, gather, written)
    on_first_rank(lambda: _finish(folder, manifest, written) if written is not None else None)


def _check_writer(mesh: Mesh) -> None:
    if dist.is_initialized() and dist.get_rank() == 0 and not mesh.is_first:
        raise PlanError(
            f"rank 0 writes, but has the place {mesh.coordinates}, and only the first rank on every axis gets whole "
            "tensors; use a mesh that starts with rank 0"
        )


def _new_stem(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return f"optimizer-{uuid.uuid4().hex[:8]}"


def _finish(folder: Path, manifest: OptimizerManifest, written: StreamedFiles) -> None:
    kept = set(manifest.weight_map.values())
    try:
        written.close()
        disk.sync_folder(folder)
        manifest.write(folder)
    except BaseException:
        for file in kept:
            (folder / file).unlink(missing_ok=True)
        raise
    disk.sync_folder(folder)  # if this fails, the new files are listed and must stay
    for path in folder.iterdir():
        if _FILE.fullmatch(path.name) and path.name not in kept:
            path.unlink()
