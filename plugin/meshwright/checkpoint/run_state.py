"""The tensors of a run and how its ranks hold them: the model's weights and the optimizer's state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.checkpoint.optimizer_manifest import OptimizerManifest
from meshwright.checkpoint.optimizer_state import (
    State,
    describe_optimizer,
    local_values,
    saved_tensors,
    tensor_forms,
)
from meshwright.checkpoint.safetensors_file import DTYPES
from meshwright.checkpoint.shares import Held, Place, Sizes
from meshwright.errors import CheckpointError
from meshwright.optim.engine_state import check_no_engine
from meshwright.optim.runtime import Runtime, find_runtime
from meshwright.optim.state_parts import OptimizerParts
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


def mesh_of(model: nn.Module) -> tuple[Runtime, Mesh]:
    """Return the runtime of a model, or one of a single rank, and this rank's place.

    Raises:
        CheckpointError: if an engine holds the model's state, or several processes the model, and it is not
            distributed over them.
    """
    check_no_engine(model)
    runtime = find_runtime(model) or Runtime(axes=Axes(), parameters=[])
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
    return runtime, Mesh(place=place, sizes=sizes)


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


def optimizer_tensors(found: OptimizerParts, state: State, device: torch.device) -> dict[str, RunTensor]:
    """Return the tensors of an optimizer's state, by key.

    Args:
        found: the optimizer's parts, with ``has_master`` as it is on all ranks together.
        state: the description of the state of all ranks.
        device: the device of elements that have no state yet.
    """
    sizes, sources = _sizes(found.runtime), saved_tensors(found, state)
    tensors: dict[str, RunTensor] = {}
    for key, form in tensor_forms(found, state).items():
        part = found.parts[sources[key][0]]
        if form[1] == tuple(part.record.global_shape):
            held = Held.shard(form[0], part.record, part.cut, sizes.tp)
        else:
            held = Held.whole(*form, sizes)
        values = functools.partial(local_values, found, sources[key], form, device)
        tensors[key] = RunTensor(held=held, values=values)
    return tensors


def optimizer_fields(found: OptimizerParts, state: State) -> dict[str, Any]:
    """Return the rest of an optimizer's state as JSON.

    Raises:
        CheckpointError: if an option is neither a number nor a text.
    """
    described = vars(describe_optimizer(found, state, {}))
    return {name: value for name, value in described.items() if name not in ("weight_map", "format")}


def optimizer_manifest(fields: dict[str, Any], folder: str) -> OptimizerManifest:
    """Return the optimizer's part of a checkpoint's manifest, checked.

    Raises:
        CheckpointError: if a field is missing, unknown or of another type.
    """
    return OptimizerManifest.of({**fields, "weight_map": {}}, folder)
