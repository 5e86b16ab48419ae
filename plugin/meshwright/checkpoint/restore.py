"""Loads weights and optimizer state into a model and an optimizer that are already distributed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint.check_optimizer import IMPLEMENTATION, SavedState, check_fits
from meshwright.checkpoint.checkpoint_weights import open_weights, settled
from meshwright.checkpoint.optimizer_manifest import NAME, OptimizerManifest, decode, master_key, state_key
from meshwright.checkpoint.optimizer_state import shared_parts
from meshwright.checkpoint.safetensors_file import ShardSlice
from meshwright.checkpoint.weight_files import WeightFiles
from meshwright.compiling import without_compilation
from meshwright.errors import CheckpointError
from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.together import succeed_together, texts_of_all
from meshwright.layout.tensor_layout import is_held, layout_of
from meshwright.optim.runtime import find_runtime
from meshwright.optim.state_parts import OptimizerParts, Part
from meshwright.parallel.shard_reads import reading_shards


@on_every_rank
def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Read a checkpoint's weights into a model in place; every rank must make the call, and reads its shard only.

    The weights are converted to the model's dtype. ZeRO's float32 master weights of half-precision parameters are set
    from the converted weights; ``load_optimizer`` reads the saved master weights.

    Args:
        model: the model, distributed or not.
        path: a .safetensors file, a .safetensors.index.json, a directory with either, or a folder that
            ``save_checkpoint`` wrote. A folder of such checkpoints stands for the newest whole one in it.

    Raises:
        CheckpointError: if the checkpoint is damaged or belongs to another model; the model is then unchanged. If
            reading fails part-way, the tensors read so far have already been overwritten in the model.

    Example::

        model.save_pretrained("checkpoint")
        mw.load_weights(model, "checkpoint")
    """
    model = without_compilation(model)
    runtime = find_runtime(model)
    if runtime is not None:
        runtime.check_own(
            "load_weights",
            "load one of the engine's checkpoints, or load the weights before the engine takes over the model",
        )
    weights = None if runtime is None else runtime.weights
    source = settled(path)
    assert source is not None
    files = succeed_together(lambda: open_weights(source))
    names = succeed_together(lambda: files.names_for(model))

    def read() -> None:
        with files.progress as progress, reading_shards():
            progress.start(sum(files.entries[name][1].num_bytes for name in set(names.values())))
            for tensor in dict.fromkeys((*model.parameters(), *model.buffers())):
                if id(tensor) in names and is_held(tensor):
                    value = _read_weight(files, names[id(tensor)], tensor, is_sharded=runtime is not None)
                    # Under ZeRO stage 3 the runtime keeps this rank's part; the tensor itself has no memory.
                    if weights is None or weights.keep(tensor, value) is value:
                        tensor.data.copy_(value)

    succeed_together(read)
    if weights is not None:
        weights.release()
    if runtime is not None and runtime.gradients.zero is not None:
        for bucket in runtime.gradients.zero.sharded:
            bucket.weights.refresh()


def _read_weight(files: WeightFiles, name: str, tensor: Tensor, *, is_sharded: bool) -> Tensor:
    if is_sharded and isinstance(tensor, nn.Parameter):
        record = layout_of(tensor)
        return files.read(name, ShardSlice(rows=record.over("tp"), rank=record.place["tp"]), tensor.dtype)
    return files.read(name, ShardSlice(), tensor.dtype)


@on_every_rank
def load_optimizer(model: nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str]) -> None:
    """Load the state that ``save_optimizer`` wrote, under any plan; every rank must make the call, and reads its part.

    The plan may differ from the plan of the save in its sizes and its ZeRO stage, and may be for one process. Load the
    weights first (``ToDistributedConfig.weights`` or ``load_weights``). The parameter groups get the saved options,
    except those that set how a step is computed (foreach, fused, capturable, differentiable). If the call raises, the
    optimizer is unchanged.

    Args:
        model, optimizer: the model and its optimizer, as for ``save_optimizer``.
        directory: the folder that ``save_optimizer`` wrote.

    Raises:
        CheckpointError: if the folder cannot be read, or belongs to another model or another kind of optimizer.
        OptimizerMismatchError: if the optimizer belongs to another model.

    Example::

        mw.load_weights(model, "checkpoint")
        mw.load_optimizer(model, optimizer, "checkpoint/optimizer")
    """
    model = without_compilation(model)
    folder = Path(directory)
    found = shared_parts(model, optimizer)
    manifest, files = succeed_together(lambda: _open(folder, found))
    _check_same_everywhere(folder)
    with files.progress as progress:
        progress.start(_bytes_to_read(files, found))
        restore_optimizer(found, manifest, _OneDeviceState(files))


def restore_optimizer(found: OptimizerParts, manifest: OptimizerManifest, saved_state: SavedState) -> None:
    """Give an optimizer the state that was saved; every rank must make the call.

    Args:
        found: the optimizer, which :func:`check_fits` has compared with the manifest.
        manifest: everything that was saved except the tensors.
        saved_state: the tensors.

    Raises:
        CheckpointError: if a tensor cannot be read; the optimizer is then unchanged.
    """
    set_state(found, manifest, succeed_together(lambda: read_state(found, manifest, saved_state)))


# By parameter: the state of this rank's part, and its master weight, if any.
ReadState = dict[str, tuple[dict[str, Any], Tensor | None]]


def read_state(found: OptimizerParts, manifest: OptimizerManifest, saved_state: SavedState) -> ReadState:
    """Read this rank's part of a saved state, without changing the optimizer.

    Raises:
        CheckpointError: if a tensor cannot be read.
    """
    masters = set(manifest.masters)
    return {name: _read_part(name, part, manifest, masters, saved_state) for name, part in found.parts.items()}


def set_state(found: OptimizerParts, manifest: OptimizerManifest, loaded: ReadState) -> None:
    """Give an optimizer the state that was read."""
    options = [group["options"] for group in manifest.groups]
    for group, saved in zip(found.optimizer.param_groups, options, strict=True):
        _set_options(group, saved)
    steps_on_device = {
        id(key): bool(group.get("fused") or group.get("capturable"))
        for group in found.optimizer.param_groups
        for key in group["params"]
    }
    for name, (state, master) in loaded.items():
        key = found.parts[name].key
        if key is None:
            continue
        found.optimizer.state.pop(key, None)
        if state:
            on_device = steps_on_device.get(id(key), False)
            found.optimizer.state[key] = {
                k: v.to(key.device) if isinstance(v, Tensor) and (v.ndim or on_device) else v for k, v in state.items()
            }
        if master is not None:
            key.data.copy_(master)
    # As in torch's own load_state_dict: the class brings the state of an older torch up to date.
    found.optimizer.__setstate__({"state": found.optimizer.state, "param_groups": found.optimizer.param_groups})
    if found.runtime.weights is not None:
        found.runtime.weights.release()


def _open(folder: Path, found: OptimizerParts) -> tuple[OptimizerManifest, WeightFiles]:
    """Open the manifest and the files, and check them against the optimizer."""
    manifest = OptimizerManifest.read(folder)
    files = WeightFiles.open(folder / NAME)
    check_fits(folder, manifest, _OneDeviceState(files), found)
    return manifest, files


def _check_same_everywhere(folder: Path) -> None:
    """Check that all ranks find the same save, since hosts without a shared disk may have different saves."""
    if not dist.is_initialized():
        return
    digest = succeed_together(lambda: hashlib.sha256((folder / NAME).read_bytes()).hexdigest())
    digests = texts_of_all(digest)
    if others := [rank for rank, other in enumerate(digests) if other != digests[0]]:
        raise CheckpointError(
            f"rank(s) {', '.join(map(str, others))} find another save in {folder} than rank 0; copy one to every host"
        )


def _bytes_to_read(files: WeightFiles, found: OptimizerParts) -> int:
    shares = {
        name: (part.own[1] - part.own[0]) / max(part.record.shape.numel(), 1) for name, part in found.parts.items()
    }
    names = {tensor: tensor.split("/")[1:2] for tensor in files.entries}
    return sum(
        int(entry.num_bytes * shares.get(names[tensor][0], 0)) if names[tensor] else 0
        for tensor, (_, entry) in files.entries.items()
    )


def _read_part(
    name: str, part: Part, manifest: OptimizerManifest, masters: set[str], saved: SavedState
) -> tuple[dict[str, Any], Tensor | None]:
    """Return this rank's state of one parameter, on the CPU, and the parameter's master weight, if any."""
    if part.key is None:
        return {}, None
    state: dict[str, Any] = {key: decode(value) for key, value in manifest.values.get(name, {}).items()}
    for key in manifest.tensors.get(name, ()):
        form = saved.form(state_key(name, key))
        assert form is not None
        # State takes its parameter's dtype, as in torch's own load_state_dict.
        state[key] = saved.read(state_key(name, key), part, part.key.dtype if form[0].is_floating_point else form[0])
    has_master = part.has_master and name in masters
    return state, saved.read(master_key(name), part, part.key.dtype) if has_master else None


class _OneDeviceState:
    """The tensors that ``save_optimizer`` wrote."""

    def __init__(self, files: WeightFiles):
        self._files = files

    def form(self, tensor: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        found = self._files.entries.get(tensor)
        return found and (found[1].dtype, found[1].shape)

    def read(self, tensor: str, part: Part, dtype: torch.dtype) -> Tensor:
        has_shape = self._files.entries[tensor][1].shape == tuple(part.record.shape)
        span = part.own if has_shape and not part.cut.is_replicated else None
        wanted = ShardSlice(rows=part.record.over("tp"), rank=part.record.place["tp"], part=span)
        state = self._files.read(tensor, wanted, dtype)
        assert part.key is not None
        return state.view(part.key.shape) if has_shape else state


def _set_options(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, encoded in saved.items():
        if key in IMPLEMENTATION:
            continue
        value, current = decode(encoded), group.get(key)
        if isinstance(current, Tensor) and not isinstance(value, list | tuple):
            current.fill_(value)  # a scheduler or a compiled step may refer to this tensor
        else:
            group[key] = value
