"""Reads the state of an optimizer that torch saved on one process, ``torch.save(optimizer.state_dict())``."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint.one_device.optimizer_manifest import OPTIMIZER, OptimizerManifest, encode, state_key
from meshwright.checkpoint.one_device.optimizer_state import IMPLEMENTATION, check_fits, restore_optimizer
from meshwright.errors import CheckpointError
from meshwright.faults.together import succeed_together
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.optim.owners import OptimizerParts, parts_of
from meshwright.outside_files import require

_ADDED = {"initial_lr"}  # options that schedulers add to a group


def load_stock_optimizer(model: nn.Module, optimizer: Optimizer, path: str | os.PathLike[str]) -> None:
    """Load what ``torch.save(optimizer.state_dict(), path)`` wrote on one process; every rank must make the call.

    The file numbers the parameters in the order of the groups, and has no names. So the optimizer must have been built
    in the same way. The file is read with ``weights_only=True``, which runs no code.

    Args:
        model, optimizer: the model and its optimizer, distributed or not.
        path: the file.

    Raises:
        CheckpointError: if the file cannot be read, or belongs to other parameters; the optimizer is then unchanged.
    """
    found = succeed_together(lambda: parts_of(model, optimizer))

    def read() -> tuple[OptimizerManifest, _WholeState]:
        manifest, state = _described(read_pickle(path, mmap=True), found, Path(path))
        check_fits(Path(path), manifest, state, found)
        return manifest, state

    restore_optimizer(found, *succeed_together(read))


def read_pickle(path: str | os.PathLike[str], *, mmap: bool = False, classes: Sequence[type] = ()) -> Any:
    """Read what ``torch.save`` wrote, as tensors, numbers, texts and containers of them only.

    Args:
        path: the file.
        mmap: whether tensors stay on the disk until they are used.
        classes: further classes that the file may have instances of; building one must be harmless.

    Raises:
        CheckpointError: if the file cannot be read, or holds anything else.
    """
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read, or is damaged: {error}") from error


def check_pickle(path: Path) -> None:
    """Check the bytes of what ``torch.save`` wrote against its own checksums; each rank checks a share.

    Raises:
        CheckpointError: if the file is damaged, or not of this form.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def check() -> None:
        try:
            with zipfile.ZipFile(path) as archive:
                for member in archive.infolist()[rank::ranks]:
                    with archive.open(member) as file:
                        while file.read(2**20):
                            pass
        except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
            raise CheckpointError(f"{path} cannot be read, or is damaged: {error}") from error

    succeed_together(check)


class _WholeState:
    """The whole tensors of a state, from which each rank takes its part."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors

    def form(self, tensor: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        found = self._tensors.get(tensor)
        return None if found is None else (found.dtype, tuple(found.shape))

    def read(self, tensor: str, dtype: torch.dtype, layout: TensorLayout) -> Tensor:
        return layout.take(self._tensors[tensor]).to(dtype)


def _described(saved: Any, found: OptimizerParts, path: Path) -> tuple[OptimizerManifest, _WholeState]:
    """Return a saved state under the names of the parameters."""
    try:
        groups, states = saved["param_groups"], saved["state"]
        numbers = [list(group["params"]) for group in groups]
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        states = {int(number): dict(values) for number, values in states.items()}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not the state of an optimizer: {error!r}") from error
    sizes, own = [len(group) for group in numbers], [len(group) for group in found.groups]
    if sizes != own:
        raise CheckpointError(
            f"{path} has parameter groups of {sizes} parameters, but the optimizer has groups of {own}; build the "
            "optimizer as in the run that saved it"
        )
    for index, (theirs, group) in enumerate(zip(options, found.optimizer.param_groups, strict=True)):
        known = group.keys() | IMPLEMENTATION | _ADDED | {"params"}
        if other := sorted(
            (theirs.keys() - known) | (group.keys() - theirs.keys() - IMPLEMENTATION - _ADDED - {"params"})
        ):
            raise CheckpointError(
                f"{path} was saved by another kind of optimizer: group {index} differs from that of "
                f"{type(found.optimizer).__name__} in its options {', '.join(other)}"
            )
    names = {
        number: name
        for own, group in zip(numbers, found.groups, strict=True)
        for number, name in zip(own, group, strict=True)
    }
    if unknown := states.keys() - names.keys():
        raise CheckpointError(f"{path} has the state of a parameter {min(unknown)}, which is in none of its groups")
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for number, state in states.items():
        name, shape = names[number], found.parts[names[number]].layout.shape
        for key, value in state.items():
            if not isinstance(value, Tensor) or (not value.ndim and (shape or key == "step")):
                values.setdefault(name, {})[key] = encode(value, f"{path}: {key!r} of {name}")
                continue
            tensors[state_key(name, key)] = value
            if value.shape != shape:
                raise CheckpointError(
                    f"{path}: {key!r} of parameter {number} has the shape {list(value.shape)}, but {name}, which has "
                    f"its place in the optimizer, has {list(shape)}. Build the optimizer with the parameters in the "
                    "order in which they were saved"
                )
    fields: dict[str, Any] = {
        "optimizer": type(found.optimizer).__name__,
        "shapes": {name: list(part.layout.shape) for name, part in found.parts.items()},
        "groups": [
            {
                "parameters": own,
                "options": {key: encode(value, f"{path}: the option {key!r}") for key, value in group.items()},
            }
            for own, group in zip(found.groups, options, strict=True)
        ],
        "tensors": {
            names[number]: [key for key in state if state_key(names[number], key) in tensors]
            for number, state in states.items()
        },
        "values": values,
        "masters": [],
    }
    require(fields, OPTIMIZER, path)
    return OptimizerManifest(**fields), _WholeState(tensors)
