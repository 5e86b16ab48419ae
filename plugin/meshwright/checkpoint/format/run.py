"""The tensors of a run and how its ranks hold them: the model's weights and the optimizer's state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint.format.assign_writes import Held, Place, Sizes
from meshwright.checkpoint.one_device.optimizer_manifest import OptimizerManifest, master_key, state_key
from meshwright.checkpoint.one_device.safetensors_file import DTYPES
from meshwright.checkpoint.one_device.save_optimizer import (
    State,
    describe_optimizer,
    encoded_groups,
    new_state,
    own_state,
    saved_tensors,
    tensor_forms,
)
from meshwright.errors import CheckpointError
from meshwright.optim.engine_state import check_no_engine
from meshwright.optim.runtime import Runtime, find_runtime
from meshwright.optim.state_parts import OptimizerParts, parts_of
from meshwright.parallel.collectives import Axes
from meshwright.parallel.row_layout import RowLayout, ShardRecord


@dataclass(frozen=True, kw_only=True)
class RunTensor:
    """One tensor of a run.

    Args:
        held: how the ranks hold it.
        values: function that returns this rank's elements, in any shape.
    """

    held: Held
    values: Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank's place on the mesh of a run."""

    place: Place
    sizes: Sizes

    @property
    def index(self) -> int:
        """This rank's index among the files of a checkpoint."""
        return self.sizes.index(self.place)


def runtime_or_single(model: nn.Module) -> Runtime:
    """Return the runtime of a model, or one of a single rank."""
    return find_runtime(model) or Runtime(axes=Axes(), parameters=[])


def mesh_of(model: nn.Module, runtime: Runtime) -> Mesh:
    """Return this rank's place on the mesh of a model with this runtime.

    Raises:
        CheckpointError: if an engine holds the model's state, or several processes the model, and it is not
            distributed over them.
    """
    check_no_engine(model)
    sizes = _sizes(runtime)
    ranks = sizes.ranks
    # If the process group is gone, compare_before_save says so.
    processes = dist.get_world_size() if dist.is_initialized() else ranks
    if ranks != processes:
        raise CheckpointError(
            f"the model is distributed over {ranks} of {processes} processes, but a checkpoint needs all of them; "
            "pass the model that to_distributed returned"
        )
    place = Place(pp=runtime.pp.rank, dp=runtime.dp.rank, tp=runtime.tp.rank)
    return Mesh(place=place, sizes=sizes)


def _sizes(runtime: Runtime) -> Sizes:
    return Sizes(pp=runtime.pp.size, dp=runtime.dp.size, tp=runtime.tp.size)


def model_tensors(model: nn.Module, runtime: Runtime) -> tuple[dict[str, RunTensor], dict[str, str], dict[str, Tensor]]:
    """Return a model's parameters and persistent buffers.

    Returns:
        The tensors by key, the key of each tied weight's values by its other keys, and the model's own tensor objects
        by key.
    """
    tensors: dict[str, RunTensor] = {}
    ties: dict[str, str] = {}
    objects: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        key = f"weights/{name}"
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{name} of the model's state_dict is a {type(tensor).__name__}, and a checkpoint holds its tensors "
                "only. Save it as extra=..."
            )
        if tensor.dtype not in DTYPES.values() or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"{name} of the model's state_dict is {tensor.dtype}, {tensor.layout}, which safetensors files do not "
                "hold. Register it with persistent=False, or convert it"
            )
        if id(tensor) in first:
            ties[key] = first[id(tensor)]
            continue
        first[id(tensor)] = key
        objects[key] = tensor
        tensors[key] = _weight(tensor, runtime)
    return tensors, ties, objects


def _weight(tensor: Tensor, runtime: Runtime) -> RunTensor:
    record = getattr(tensor, "meshwright", None)
    tp, dp = runtime.tp.size, runtime.dp.size
    if not isinstance(record, ShardRecord):
        held = Held.whole(tensor.dtype, tuple(tensor.shape), _sizes(runtime))
        return RunTensor(held=held, values=_flattened(tensor))
    if runtime.weights is not None and isinstance(tensor, nn.Parameter):
        weights, parameter = runtime.weights, tensor
        cut = weights.part(parameter)[1]
        return RunTensor(
            held=Held.shard(tensor.dtype, record, cut, tp), values=lambda: weights.part(parameter)[0].detach()
        )
    cut = RowLayout.replicated(tensor.shape.numel(), dp)
    return RunTensor(held=Held.shard(tensor.dtype, record, cut, tp), values=_flattened(tensor))


def _flattened(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor.detach().reshape(-1)


@dataclass(frozen=True, kw_only=True)
class RankOptimizer:
    """What this rank has of an optimizer at one moment.

    Args:
        found: its parts.
        state: a description of this rank's state.
        groups: the names and the encoded options of each group.
        values: function that returns this rank's elements of each tensor, by the tensor's key in files.
    """

    found: OptimizerParts
    state: State
    groups: list[dict[str, Any]]
    values: dict[str, Callable[[], Tensor]]

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer) -> RankOptimizer:
        """Look at an optimizer.

        Raises:
            OptimizerMismatchError: if it belongs to another model.
            CheckpointError: if an engine holds its state, or options or state are neither numbers nor tensors.
        """
        found = parts_of(model, optimizer)
        state, values = own_state(found), {}
        for name, part in found.parts.items():
            if part.key is None:
                continue
            if part.has_master:
                values[master_key(name)] = part.key.detach
            for key, described in state.get(name, {}).items():
                if isinstance(described, tuple):
                    values[state_key(name, key)] = found.optimizer.state[part.key][key].detach
        return RankOptimizer(found=found, state=state, groups=encoded_groups(found), values=values)

    def tensors(self, state: State, device: torch.device) -> dict[str, RunTensor]:
        """Return the tensors of the optimizer's state, by key.

        Args:
            state: the description of the state of all ranks.
            device: the device of elements that have no state yet.
        """
        sizes, sources = _sizes(self.found.runtime), saved_tensors(self.found, state)
        tensors: dict[str, RunTensor] = {}
        for key, form in tensor_forms(self.found, state).items():
            part = self.found.parts[sources[key][0]]
            if form[1] == tuple(part.record.global_shape):
                held = Held.shard(form[0], part.record, part.cut, sizes.tp)
            else:
                held = Held.whole(*form, sizes)
            values = self.values.get(key) or functools.partial(new_state, part, form[0], device)
            tensors[key] = RunTensor(held=held, values=values)
        return tensors

    def fields(self, state: State) -> dict[str, Any]:
        """Return the rest of the state of all ranks as JSON."""
        described = vars(describe_optimizer(self.found, state, self.groups, {}))
        return {name: value for name, value in described.items() if name not in ("weight_map", "format")}


def optimizer_manifest(fields: dict[str, Any]) -> OptimizerManifest:
    """Return the optimizer's part of a checkpoint's manifest, which was checked when it was read."""
    return OptimizerManifest(**fields, weight_map={})
