"""Checks that a saved optimizer state is one that an optimizer can go on from."""

from __future__ import annotations

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
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.optim.state_parts import OptimizerParts
from meshwright.schema import shown

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
