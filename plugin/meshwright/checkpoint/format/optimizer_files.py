"""The state of an optimizer alone: a folder with the parts of all ranks, as in a checkpoint, and ``optimizer.json``,
which is the manifest of a checkpoint without weights.

Each save writes files with new names, and then replaces the manifest, which lists them, in one step. A crash at any
time therefore leaves the last complete save. Earlier versions wrote whole tensors on rank 0, which are read too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import uuid
from dataclasses import asdict, replace
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from meshwright.checkpoint.files import disk
from meshwright.checkpoint.files.disk import naming_the_disk
from meshwright.checkpoint.files.local_disk import seen_in_time
from meshwright.checkpoint.files.place import local_path, read_same
from meshwright.checkpoint.files.reading import digest, digest_in, is_digested
from meshwright.checkpoint.format.checkpoint_folders import NAME, OPTIMIZER_NAME, Manifest, wait_for_files
from meshwright.checkpoint.format.load_checkpoint import SavedTensors
from meshwright.checkpoint.format.load_weights import OpenCheckpoint
from meshwright.checkpoint.format.part_files import PART, FileRecord, file_names
from meshwright.checkpoint.format.rank_state import RankState, Run
from meshwright.checkpoint.one_device.optimizer_manifest import OptimizerManifest, master_key, state_key
from meshwright.checkpoint.one_device.optimizer_state import SavedState, check_fits, restore_optimizer
from meshwright.checkpoint.one_device.rank_optimizer import RankOptimizer
from meshwright.checkpoint.one_device.weight_files import WeightFiles
from meshwright.compiling import without_compilation
from meshwright.errors import CheckpointError
from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.together import exchange_together, on_first_rank, succeed_together
from meshwright.optim.owners import OptimizerParts, parts_of
from meshwright.optim.runtime import device_of
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.progress import Progress, is_first_rank

_WHOLE_TENSORS = re.compile(r"optimizer-[0-9a-f]{8}(-\d{5}-of-\d{5})?\.safetensors")  # of earlier versions
_NOTHING = dict.fromkeys(("step", "loader", "scheduler", "scaler", "extra", "streams"))


@on_every_rank
def save_optimizer(model: nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str]) -> None:
    """Write an optimizer's state for ``load_optimizer``; every rank must make the call, and writes a share.

    The save has the state of each parameter under its one-device name, the options of the parameter groups and, if ZeRO
    keeps them, float32 master weights. No rank gathers a tensor. To save the model's weights, call
    ``model.save_pretrained``.

    Args:
        model: the optimizer's model, distributed or not.
        optimizer: the optimizer, as ``to_distributed`` or ``shard_optimizer`` returned it.
        directory: the folder, created if it does not exist, on a disk that all hosts share; an earlier save in it is
            replaced only once the new one is complete.

    Raises:
        OptimizerMismatchError: if the optimizer belongs to another model.
        CheckpointError: if a state value is neither a tensor nor a number, or the folder is that of a checkpoint.
        OSError: on every rank, if a rank cannot write; the folder then holds what it held before.

    Example::

        model.save_pretrained("checkpoint")
        mw.save_optimizer(model, optimizer, "checkpoint/optimizer")
    """
    model = without_compilation(model, "save_optimizer(model, optimizer, directory)")
    folder = local_path(directory, "save_optimizer")
    own, texts = exchange_together(lambda: ((own := _state(model, optimizer)), own.text()))
    with reading_shards(), Progress(f"writing {folder}") as progress:
        part, manifest = succeed_together(lambda: own.planned(texts))
        tag = on_first_rank(lambda: _new_tag(folder))
        progress.start(part.num_bytes)

        def write() -> str:
            if own.mesh.size == 1 and not is_first_rank():  # every process has the whole model
                return "{}"
            if not seen_in_time(folder.is_dir, folder.parent):
                raise CheckpointError(
                    f"{folder}, which rank 0 has made, is not there: save to a disk that all hosts share"
                )
            with naming_the_disk(folder, part.num_bytes):
                records = part.write(folder, progress.add, tag)
            return json.dumps({name: asdict(record) for name, record in records.items()})

        try:
            _, texts = exchange_together(lambda: (None, write()))
        except Exception:  # nothing lists the parts yet, and this rank's may be on another disk than rank 0's
            with contextlib.suppress(OSError):
                for name in file_names(part.place, tag):
                    (folder / name).unlink(missing_ok=True)
            raise
        try:
            on_first_rank(lambda: _commit(folder, manifest(), texts))
        except Exception:
            if is_first_rank():
                with contextlib.suppress(OSError):
                    _remove_unlisted(folder)
            raise


def _state(model: nn.Module, optimizer: Optimizer) -> RankState:
    own = RankOptimizer.of(model, optimizer)
    runtime = own.found.runtime
    run = Run(model=model, runtime=runtime, device=device_of(model), mesh=runtime.mesh.without_groups())
    if run.mesh.size > 1:
        run.check()
    return RankState(
        mesh=run.mesh,
        device=run.device,
        weights={},
        ties={},
        optimizer=own,
        random=dict,
        config=lambda: None,
        plan=runtime.plan,
        states=_NOTHING,
    )


def _new_tag(folder: Path) -> str:
    with naming_the_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if (folder / NAME).exists():
        raise CheckpointError(
            f"{folder} is a checkpoint, which has an optimizer's state already; save to a folder of its own, such as "
            f"{folder / 'optimizer'}"
        )
    return uuid.uuid4().hex[:8]


def _commit(folder: Path, manifest: Manifest, texts: list[str]) -> None:
    files = {name: FileRecord(**record) for text in texts for name, record in json.loads(text).items()}
    manifest = replace(manifest, number=1, files=files)
    wait_for_files(folder, manifest)
    with naming_the_disk(folder):
        disk.sync_folder(folder)
        disk.replace_file(folder / OPTIMIZER_NAME, manifest.write)
        disk.sync_folder(folder)
        _remove_unlisted(folder)


def _remove_unlisted(folder: Path) -> None:
    """Remove the files of saves that have been replaced or have failed."""
    path = folder / OPTIMIZER_NAME
    listed = path.read_bytes() if path.exists() else b""
    for file in folder.iterdir():
        part = PART.fullmatch(file.name)
        is_ours = part["tag"] if part is not None else _WHOLE_TENSORS.fullmatch(file.name)
        if is_ours and file.name.encode() not in listed:
            disk.remove(file)


@on_every_rank
def load_optimizer(model: nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str]) -> None:
    """Load the state that ``save_optimizer`` wrote, under any plan; every rank must make the call, and reads its part.

    The plan may differ from the plan of the save in its sizes and its ZeRO stage, and may be for one process. Load the
    weights first (``ToDistributedConfig.weights`` or ``load_weights``). The parameter groups get the saved options,
    except those that set how a step is computed (foreach, fused, capturable, differentiable). If the call raises, the
    optimizer is unchanged.

    Args:
        model: the model, as for ``save_optimizer``.
        optimizer: its optimizer.
        directory: the folder that ``save_optimizer`` wrote.

    Raises:
        CheckpointError: if the folder cannot be read, or belongs to another model or another kind of optimizer.
        OptimizerMismatchError: if the optimizer belongs to another model.

    Example::

        mw.load_weights(model, "checkpoint")
        mw.load_optimizer(model, optimizer, "checkpoint/optimizer")
    """
    model = without_compilation(model, "load_optimizer(model, optimizer, directory)")
    folder = local_path(directory, "load_optimizer")
    found = succeed_together(lambda: parts_of(model, optimizer))
    with Progress(f"reading {folder}") as progress, reading_shards():
        manifest, saved = read_same(folder, lambda: _open(folder, found, progress))
        progress.start(_bytes_to_read(manifest, saved, found))
        restore_optimizer(found, manifest, saved)


def _bytes_to_read(manifest: OptimizerManifest, saved: SavedState, found: OptimizerParts) -> int:
    total = 0.0
    for name, part in found.parts.items():
        keys = [*(state_key(name, key) for key in manifest.tensors.get(name, ())), master_key(name)]
        forms = [form for form in map(saved.form, keys) if form is not None]
        share = part.layout.local_numel / max(part.layout.shape.numel(), 1)
        total += share * sum(dtype.itemsize * math.prod(shape) for dtype, shape in forms)
    return int(total)


def _open(folder: Path, found: OptimizerParts, progress: Progress) -> tuple[tuple[OptimizerManifest, SavedState], str]:
    """Open a save and check it against the optimizer."""
    path = folder / OPTIMIZER_NAME
    if not os.path.lexists(path):
        raise CheckpointError(
            f"there is no optimizer state in {folder}: it has no {OPTIMIZER_NAME}; name a folder that "
            "meshwright.save_optimizer wrote"
        )
    saved: SavedState
    if is_digested(path):
        opened = OpenCheckpoint.read(folder, OPTIMIZER_NAME)
        if opened.manifest.optimizer is None:
            raise CheckpointError(f"{path} is damaged: its 'optimizer' is None; load another checkpoint")
        manifest, saved, seen = (
            OptimizerManifest(**opened.manifest.optimizer),
            SavedTensors(opened, progress),
            digest_in(path),
        )
    else:
        manifest = OptimizerManifest.read_whole(path)  # first, since it follows no link
        saved, seen = replace(WeightFiles.open(path), progress=progress), digest(path.read_bytes())
    check_fits(folder, manifest, saved, found)
    return (manifest, saved), seen
