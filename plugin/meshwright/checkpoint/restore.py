"""Loads weights and optimizer state into a model and an optimizer that are already distributed."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint.checkpoint_weights import open_weights, settled
from meshwright.checkpoint.optimizer_manifest import NAME, OptimizerManifest, decode, master_key, state_key
from meshwright.checkpoint.optimizer_state import shared_parts
from meshwright.checkpoint.safetensors_file import ShardSlice
from meshwright.checkpoint.weight_files import WeightFiles
from meshwright.compiling import without_compilation
from meshwright.errors import CheckpointError
from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.together import succeed_together, texts_of_all
from meshwright.optim.runtime import find_runtime
from meshwright.optim.state_parts import OptimizerParts, Part
from meshwright.parallel.row_layout import is_held, record_of
from meshwright.parallel.shard_reads import reading_shards
from meshwright.schema import shown

# Options that set how a step is computed, not its result. Loading keeps the optimizer's own values of these.
IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}


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
    if runtime is not None and runtime.zero is not None:
        for bucket in runtime.zero.sharded:
            bucket.weights.refresh()


def _read_weight(files: WeightFiles, name: str, tensor: Tensor, *, is_sharded: bool) -> Tensor:
    if is_sharded and isinstance(tensor, nn.Parameter):
        record = record_of(tensor)
        return files.read(name, ShardSlice(rows=record.layout, rank=record.rank), tensor.dtype)
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


class SavedState(Protocol):
    """The tensors of a saved optimizer, in whichever files they are."""

    def form(self, tensor: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Return the dtype and the shape of a tensor; None if it was not saved."""

    def read(self, tensor: str, part: Part, dtype: torch.dtype) -> Tensor:
        """Return this rank's part of a tensor, on the CPU in the shape of the part; return the whole tensor if its
        shape is not that of its parameter."""


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
    kind: Any = type(found.optimizer)
    _, known, numbers = _state_names(kind)
    for name, (state, master) in loaded.items():
        key = found.parts[name].key
        if key is None:
            continue
        found.optimizer.state.pop(key, None)
        if type(state.get("step")) in (int, float) and "step" in known - numbers:
            state["step"] = torch.tensor(float(state["step"]))  # of an older torch; its own load_state_dict does so too
        if state:
            on_device = steps_on_device.get(id(key), False)
            found.optimizer.state[key] = {
                k: v.to(key.device) if isinstance(v, Tensor) and (v.ndim or on_device) else v for k, v in state.items()
            }
        if master is not None:
            key.data.copy_(master)
    if found.runtime.weights is not None:
        found.runtime.weights.release()


def _open(folder: Path, found: OptimizerParts) -> tuple[OptimizerManifest, WeightFiles]:
    """Open the manifest and the files, and check them against the optimizer."""
    manifest = OptimizerManifest.read(folder)
    files = WeightFiles.open(folder / NAME)
    check_fits(folder, manifest, _OneDeviceState(files), found)
    return manifest, files


def check_fits(folder: Path, manifest: OptimizerManifest, saved_state: SavedState, found: OptimizerParts) -> None:
    """Check that a saved state is that of an optimizer.

    Raises:
        CheckpointError: if it is the state of other parameters or of another optimizer, or a tensor was not saved.
    """
    kind = type(found.optimizer).__name__
    if manifest.optimizer != kind:
        raise CheckpointError(
            f"{folder} has the state of {manifest.optimizer}, but the optimizer is {kind}, which has other "
            f"state. Pass a {manifest.optimizer}, or start with a new {kind} without loading"
        )
    shapes = {name: list(part.record.global_shape) for name, part in found.parts.items()}
    problems = [f"{name} is not in the state" for name in shapes if name not in manifest.shapes]
    problems += [f"{name} is not among the optimizer's parameters" for name in manifest.shapes if name not in shapes]
    problems += [
        f"{name}: {manifest.shapes[name]} in the state, {shape} in the model"
        for name, shape in shapes.items()
        if name in manifest.shapes and manifest.shapes[name] != shape
    ]
    saved = [group["parameters"] for group in manifest.groups]
    if not problems and [sorted(names) for names in saved] != [sorted(names) for names in found.groups]:
        of_saved = {name: index for index, names in enumerate(saved) for name in names}
        problems = [
            f"{name} is in group {index} of the optimizer, but in group {of_saved.get(name)} of the state"
            for index, names in enumerate(found.groups)
            for name in names
            if of_saved.get(name) != index
        ] or [f"the state has {len(saved)} parameter groups, the optimizer {len(found.groups)}"]
    if problems:
        shown = "\n  ".join(problems[:20] + ([f"... and {len(problems) - 20} more"] if len(problems) > 20 else []))
        raise CheckpointError(f"the optimizer state in {folder} does not fit this model and optimizer:\n  {shown}")
    for index, (group, options) in enumerate(zip(found.optimizer.param_groups, manifest.groups, strict=True)):
        _check_options(folder, f"group {index}", group, options["options"], found.optimizer.defaults)
    _check_state_names(folder, manifest, found)
    expected = [state_key(name, key) for name, keys in manifest.tensors.items() for key in keys]
    expected += [master_key(name) for name in manifest.masters]
    if lost := [tensor for tensor in expected if saved_state.form(tensor) is None]:
        raise CheckpointError(f"{folder} is damaged: it lists no file for {lost[0]!r} and {len(lost) - 1} more")
    for name, part in found.parts.items():
        for key in manifest.tensors.get(name, ()):
            form = saved_state.form(state_key(name, key))
            shape = form[1] if form else ()
            if shape != tuple(part.record.global_shape) and not part.is_whole:
                raise CheckpointError(
                    f"the state {key!r} of {name} has the shape {list(shape)}, not that of the parameter, so it cannot "
                    "be cut into shards; load it under a plan with tp=1 and zero_stage=0"
                )


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
        name: (part.own[1] - part.own[0]) / max(part.record.global_shape.numel(), 1)
        for name, part in found.parts.items()
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
        has_shape = self._files.entries[tensor][1].shape == tuple(part.record.global_shape)
        span = part.own if has_shape and not part.cut.is_replicated else None
        wanted = ShardSlice(rows=part.record.layout, rank=part.record.rank, part=span)
        state = self._files.read(tensor, wanted, dtype)
        assert part.key is not None
        return state.view(part.key.shape) if has_shape else state


def _check_state_names(folder: Path, manifest: OptimizerManifest, found: OptimizerParts) -> None:
    """Check that one of torch's optimizers would find the state that it needs, and no other."""
    kind: Any = type(found.optimizer)
    required, known, numbers = _state_names(kind)
    if not known:
        return
    for name in found.parts:
        has = {*manifest.tensors.get(name, ()), *manifest.values.get(name, ())}
        wrong = sorted(has - known) or sorted(required - has if has else ())
        if wrong:
            what = "have the unknown state" if wrong[0] in has else "lack the state"
            raise CheckpointError(
                f"{folder} is damaged: 'tensors' and 'values' of {name} {what} {shown(wrong[0])} of "
                f"{manifest.optimizer}; load another checkpoint"
            )
        for key, value in manifest.values.get(name, {}).items():
            if key not in numbers | {"step"} and not isinstance(decode(value), Tensor | None):
                raise CheckpointError(
                    f"{folder} is damaged: 'values' of {name} have the state {key!r} that is {shown(value)}, and a "
                    f"tensor in {manifest.optimizer}; load another checkpoint"
                )


@functools.cache
def _state_names(kind: Any) -> tuple[set[str], set[str], set[str]]:
    """Return the names of the state that a class of torch.optim always has, can have, and has as no tensor.

    They are empty for other classes.
    """
    if kind.__module__.partition(".")[0] != "torch":
        return set(), set(), set()
    found: list[set[str]] = []
    numbers: set[str] = set()
    options_of: tuple[dict[str, Any], ...] = (
        {},
        {"amsgrad": True},
        {"momentum": 0.5},
        {"momentum": 0.5, "centered": True},
    )
    for shape, options in itertools.product([(2,), (2, 2)], options_of):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.zeros(shape)
        try:
            optimizer = kind([parameter], **options)
            optimizer.step()
        except (TypeError, ValueError, RuntimeError):  # no such option, a step with a closure, other gradients
            continue
        state = optimizer.state[parameter]
        found.append(set(state))
        numbers |= {key for key, value in state.items() if not isinstance(value, Tensor | None)}
    return (set.intersection(*found), set.union(*found), numbers) if found else (set(), set(), set())


def _check_options(
    folder: Path, what: str, group: dict[str, Any], saved: dict[str, Any], defaults: dict[str, Any]
) -> None:
    """Check the options of a group against those of the optimizer."""
    wanted = defaults.keys() - IMPLEMENTATION
    if lost := sorted(wanted - saved.keys()):
        raise CheckpointError(
            f"{folder} has no option {lost[0]!r} in {what} of the optimizer: it is damaged, or of another torch"
        )
    for key in sorted(saved.keys() & group.keys() - IMPLEMENTATION):
        value = decode(saved[key])
        if _kind(value) != _kind(group[key]) and value is not None and group[key] is not None:
            raise CheckpointError(
                f"{folder} is damaged: the option {key!r} in {what} of the optimizer is {value!r}, and a "
                f"{_kind(group[key])} in this optimizer"
            )


def _kind(value: Any) -> str:
    """The kind of an option's value: numbers and tensors of one number may stand for each other."""
    if isinstance(value, bool):
        return "truth value"
    if isinstance(value, int | float | Tensor):
        return "number"
    if isinstance(value, tuple | list):
        return f"sequence of {len(value)}"
    return type(value).__name__


def _set_options(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, encoded in saved.items():
        if key in IMPLEMENTATION:
            continue
        value, current = decode(encoded), group.get(key)
        if isinstance(current, Tensor) and not isinstance(value, list | tuple):
            current.fill_(value)  # a scheduler or a compiled step may refer to this tensor
        else:
            group[key] = value
