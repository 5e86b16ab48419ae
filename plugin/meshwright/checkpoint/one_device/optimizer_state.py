"""Checks a saved state against an optimizer, and restores it under any plan."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.checkpoint.files.place import Place
from meshwright.checkpoint.one_device.optimizer_manifest import (
    OptimizerManifest,
    decode,
    kind_of,
    master_key,
    state_key,
)
from meshwright.checkpoint.one_device.weight_files import some
from meshwright.errors import CheckpointError
from meshwright.faults.together import succeed_together
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.optim.owners import OptimizerParts, Part
from meshwright.optim.zero.sliced_optimizer import LentSlices
from meshwright.outside_files import shown
from meshwright.parallel.shards.state_of_parts import open_state

# Options that set how a step is computed, not its result. Loading keeps the optimizer's own values of these.
IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}


class SavedState(Protocol):
    """The tensors of a saved optimizer, in whichever files they are."""

    def form(self, tensor: str, /) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Return the dtype and the shape of a tensor; None if it was not saved."""

    def read(self, tensor: str, dtype: torch.dtype, layout: TensorLayout, /) -> Tensor:
        """Return what this rank has of a tensor, on the CPU."""


def check_fits(folder: Place, manifest: OptimizerManifest, saved_state: SavedState, found: OptimizerParts) -> None:
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
    shapes = {name: list(part.layout.shape) for name, part in found.parts.items()}
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
        raise CheckpointError(
            f"the optimizer state in {folder} does not fit this model and optimizer:\n  {some(problems)}"
        )
    for index, (group, described) in enumerate(zip(found.optimizer.param_groups, manifest.groups, strict=True)):
        wanted = found.optimizer.defaults.keys() - IMPLEMENTATION
        if lost := sorted(wanted - described["options"].keys()):
            raise CheckpointError(
                f"{folder} has no option {lost[0]!r} in group {index} of the optimizer: it is damaged, or of another "
                "torch"
            )
        for key in sorted(described["options"].keys() & group.keys() - IMPLEMENTATION):
            value = decode(described["options"][key])
            if _kind(value) != _kind(group[key]) and value is not None and group[key] is not None:
                raise CheckpointError(
                    f"{folder} is damaged: the option {key!r} in group {index} of the optimizer is {value!r}, and a "
                    f"{_kind(group[key])} in this optimizer"
                )
    _check_state_names(folder, manifest, found)
    expected = [state_key(name, key) for name, keys in manifest.tensors.items() for key in keys]
    expected += [master_key(name) for name in manifest.masters]
    if lost := [tensor for tensor in expected if saved_state.form(tensor) is None]:
        raise CheckpointError(f"{folder} is damaged: it lists no file for {lost[0]!r} and {len(lost) - 1} more")
    for name, part in found.parts.items():
        for key in manifest.tensors.get(name, ()):
            form = saved_state.form(state_key(name, key))
            shape = form[1] if form else ()
            if shape != part.layout.shape and not (part.is_whole or part.is_owned):
                raise CheckpointError(
                    f"the state {key!r} of {name} has the shape {list(shape)}, not that of the parameter, so it cannot "
                    "be cut into shards; load it under a plan with tp=pp=ep=etp=1 and zero_stage=0"
                )


def _check_state_names(folder: Place, manifest: OptimizerManifest, found: OptimizerParts) -> None:
    """Check that one of torch's optimizers would find the state that it needs, and no other."""
    kind: object = type(found.optimizer)
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
            with torch.no_grad():
                inspect.unwrap(kind.step)(optimizer)  # without the hooks, which watch the program's own steps
        except (TypeError, ValueError, RuntimeError):  # no such option, a step with a closure, other gradients
            continue
        state = optimizer.state[parameter]
        found.append(set(state))
        numbers |= {key for key, value in state.items() if not isinstance(value, Tensor | None)}
    return (set.intersection(*found), set.union(*found), numbers) if found else (set(), set(), set())


def _kind(value: object) -> str:
    return f"sequence of {len(value)}" if isinstance(value, tuple | list) else kind_of(value)


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
