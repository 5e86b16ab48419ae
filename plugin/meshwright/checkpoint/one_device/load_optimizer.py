"""Loads the state that ``save_optimizer`` wrote into an optimizer, under any plan."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint.files.place import local_path
from meshwright.checkpoint.files.reading import digest
from meshwright.checkpoint.files.same_everywhere import read_same
from meshwright.checkpoint.one_device.check_optimizer import IMPLEMENTATION, SavedState, check_fits
from meshwright.checkpoint.one_device.optimizer_manifest import NAME, OptimizerManifest, decode, master_key, state_key
from meshwright.checkpoint.one_device.rank_optimizer import shared_parts
from meshwright.checkpoint.one_device.weight_files import WeightFiles
from meshwright.compiling import without_compilation
from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.together import succeed_together
from meshwright.optim.state_parts import OptimizerParts, Part
from meshwright.optim.zero.sliced_optimizer import LentSlices
from meshwright.parallel.shards.state_of_parts import open_state


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
    found = shared_parts(model, optimizer)
    manifest, files = read_same(folder, lambda: (_open(folder, found), digest((folder / NAME).read_bytes())))
    with files.progress as progress:
        progress.start(_bytes_to_read(files, found))
        restore_optimizer(found, manifest, files)


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
ReadState = dict[str, tuple[dict[str, object], Tensor | None]]


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
        name: bool(group.get("fused") or group.get("capturable"))
        for group, names in zip(found.optimizer.param_groups, found.groups, strict=True)
        for name in names
    }
    for name, (state, master) in loaded.items():
        key, to = found.parts[name].key, found.parts[name].master
        if master is not None and to is not None:
            to.data.copy_(master)
        if key is None:
            continue
        on_device = steps_on_device[name]
        with open_state(found.optimizer) as own:
            own.pop(key, None)
            if state:
                own[key] = {
                    k: v.to(key.device) if isinstance(v, Tensor) and (v.ndim or on_device) else v
                    for k, v in state.items()
                }
    # As in torch's own load_state_dict: the class brings the state of an older torch up to date.
    zero = found.runtime.gradients.zero
    lent = contextlib.nullcontext() if zero is None else LentSlices(found.optimizer, zero)
    with open_state(found.optimizer) as own, lent:
        found.optimizer.__setstate__({"state": own, "param_groups": found.optimizer.param_groups})
    if found.runtime.weights is not None:
        found.runtime.weights.release()


def _open(folder: Path, found: OptimizerParts) -> tuple[OptimizerManifest, WeightFiles]:
    """Open the manifest and the files, and check them against the optimizer."""
    manifest = OptimizerManifest.read(folder)
    files = WeightFiles.open(folder / NAME)
    check_fits(folder, manifest, files, found)
    return manifest, files


def _bytes_to_read(files: WeightFiles, found: OptimizerParts) -> int:
    shares = {name: part.layout.local_numel / max(part.layout.shape.numel(), 1) for name, part in found.parts.items()}
    names = {tensor: tensor.split("/")[1:2] for tensor in files.entries}
    return sum(
        int(entry.num_bytes * shares.get(names[tensor][0], 0)) if names[tensor] else 0
        for tensor, (_, entry) in files.entries.items()
    )


def _read_part(
    name: str, part: Part, manifest: OptimizerManifest, masters: set[str], saved: SavedState
) -> tuple[dict[str, object], Tensor | None]:
    """Return this rank's state of one parameter, on the CPU, and the parameter's master weight, if any."""
    master = None
    if part.has_master and name in masters and part.master is not None:
        master = saved.read(master_key(name), part.master.dtype, part.masters)
    if part.key is None:
        return {}, master
    state: dict[str, object] = {key: decode(value) for key, value in manifest.values.get(name, {}).items()}
    for key in manifest.tensors.get(name, ()):
        form = saved.form(state_key(name, key))
        assert form is not None
        # State takes its parameter's dtype, as in torch's own load_state_dict.
        dtype = part.key.dtype if form[0].is_floating_point else form[0]
        value = saved.read(state_key(name, key), dtype, part.layout_of_state(form[1]))
        state[key] = value.view(form[1]) if part.is_owned else value
    return state, master


def _set_options(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, encoded in saved.items():
        if key in IMPLEMENTATION:
            continue
        value, current = decode(encoded), group.get(key)
        if isinstance(current, Tensor) and not isinstance(value, list | tuple):
            current.fill_(value)  # a scheduler or a compiled step may refer to this tensor
        else:
            group[key] = value
