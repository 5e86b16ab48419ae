"""Gathers the optimizer's state under one-device names, and writes it for ``load_optimizer``.

The folder has safetensors files with whole tensors, and the manifest ``optimizer.json`` with all else. Each save writes
files with new names, and then replaces the manifest, which lists them, in one step. A crash at any time therefore
leaves the last complete save.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from meshwright.checkpoint.files import disk
from meshwright.checkpoint.files.place import local_path
from meshwright.checkpoint.one_device.optimizer_manifest import (
    OptimizerManifest,
    ParameterGroup,
    encode,
    master_key,
    state_key,
)
from meshwright.checkpoint.one_device.safetensors_file import Form, num_bytes
from meshwright.checkpoint.one_device.streamed_files import StreamedFiles, parse_bytes, split, stream
from meshwright.checkpoint.one_device.whole_tensors import assemble
from meshwright.compiling import without_compilation
from meshwright.errors import CheckpointError, PlanError
from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.together import exchange_together, on_first_rank, succeed_together, texts_of_all
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Mesh
from meshwright.optim.owners import OptimizerParts, Part, parts_of
from meshwright.optim.runtime import device_of
from meshwright.parallel.shards.stand_in import own_shape
from meshwright.parallel.shards.state_of_parts import state_of
from meshwright.progress import is_first_rank

State = dict[str, dict[str, Any]]  # by parameter, then by key: ("cut" | "whole", dtype, shape) or an encoded value


@dataclass(frozen=True, kw_only=True)
class RankTensor:
    """What this rank has of a tensor.

    Args:
        dtype: its dtype.
        layout: which of its elements each rank has.
        values: function that returns this rank's elements, in any shape.
    """

    dtype: torch.dtype
    layout: TensorLayout
    values: Callable[[], Tensor]

    @property
    def form(self) -> Form:
        """The dtype and the one-device shape."""
        return self.dtype, tuple(self.layout.shape)


@dataclass(frozen=True, kw_only=True)
class RankOptimizer:
    """What this rank has of an optimizer at one moment.

    Args:
        found: its parts.
        state: a description of this rank's state, or of the state of all ranks.
        groups: the names and the encoded options of each group.
        values: function that returns this rank's elements of each tensor, by the tensor's key in files.
    """

    found: OptimizerParts
    state: State
    groups: list[ParameterGroup]
    values: dict[str, Callable[[], Tensor]]

    @staticmethod
    def of(model: nn.Module, optimizer: Optimizer) -> RankOptimizer:
        """Look at an optimizer.

        Raises:
            OptimizerMismatchError: if it belongs to another model.
            CheckpointError: if an engine holds its state, or options or state are neither numbers nor tensors.
        """
        found, state, values = parts_of(model, optimizer), {}, {}
        for name, part in found.parts.items():
            if part.has_master and part.master is not None:
                values[master_key(name)] = part.master.detach
            if part.key is None:
                continue
            if own := state_of(found.optimizer, part.key):
                state[name] = {k: _described(name, k, v, part) for k, v in own.items()}
            for key, described in state.get(name, {}).items():
                if isinstance(described, tuple):
                    values[state_key(name, key)] = own[key].detach
        return RankOptimizer(found=found, state=state, groups=_encoded_groups(found), values=values)

    def text(self) -> str:
        """Return what :meth:`with_all` needs of each rank."""
        return json.dumps({"masters": _masters(self.found), "state": self.state}, default=str)

    def with_all(self, texts: list[str]) -> RankOptimizer:
        """Return this with a description of the state of all ranks, and ``has_master`` as it is on all of them.

        Under ZeRO each rank has the state of its slices only, and under pp of the parameters of its stage.

        Args:
            texts: the texts of all ranks.
        """
        of_ranks = [json.loads(text) for text in texts]
        found = _with_masters(self.found, [each["masters"] for each in of_ranks])
        return dataclasses.replace(self, found=found, state=_merged(each["state"] for each in of_ranks))

    def tensors(self, device: torch.device) -> dict[str, RankTensor]:
        """Return the tensors of the state of all ranks by key, wide dtypes first, so that files are aligned.

        Args:
            device: the device of elements that have no state yet.
        """
        tensors: dict[str, RankTensor] = {}
        for name, part in self.found.parts.items():
            forms = {state_key(name, key): v[1:] for key, v in self.state.get(name, {}).items() if isinstance(v, tuple)}
            if part.has_master:
                forms[master_key(name)] = (torch.float32, part.layout.shape)
            for key, (dtype, shape) in forms.items():
                layout = part.masters if key == master_key(name) else part.layout_of_state(shape)
                values = self.values.get(key) or functools.partial(_new_state, layout, dtype, device)
                tensors[key] = RankTensor(dtype=dtype, layout=layout, values=values)
        return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))

    def manifest(self, weight_map: dict[str, str]) -> OptimizerManifest:
        """Return all but the tensors.

        Args:
            weight_map: the file of each tensor.
        """
        tensors = {name: [key for key, v in kept.items() if isinstance(v, tuple)] for name, kept in self.state.items()}
        return OptimizerManifest(
            optimizer=type(self.found.optimizer).__name__,
            shapes={name: list(part.layout.shape) for name, part in self.found.parts.items()},
            groups=self.groups,
            tensors=tensors,
            values={
                name: {key: v for key, v in kept.items() if key not in tensors[name]}
                for name, kept in self.state.items()
            },
            masters=_masters(self.found),
            weight_map=weight_map,
        )


def shared_parts(model: nn.Module, optimizer: Optimizer) -> OptimizerParts:
    """Return this rank's parts of an optimizer's parameters, with ``has_master`` as it is on all stages together.

    Every rank must make the call.

    Raises:
        OptimizerMismatchError: if the optimizer belongs to another model.
    """
    found = succeed_together(lambda: parts_of(model, optimizer))
    if found.runtime.mesh.pp.size == 1:
        return found
    return _with_masters(found, [json.loads(text) for text in texts_of_all(json.dumps(_masters(found)))])


def _masters(found: OptimizerParts) -> list[str]:
    return [name for name, part in found.parts.items() if part.has_master]


def _with_masters(found: OptimizerParts, of_ranks: list[list[str]]) -> OptimizerParts:
    masters = {name for names in of_ranks for name in names}
    parts = {name: dataclasses.replace(part, has_master=name in masters) for name, part in found.parts.items()}
    return dataclasses.replace(found, parts=parts)


def _merged(states: Iterable[State]) -> State:
    result: State = {}
    for state in states:
        for name, values in state.items():
            known = result.setdefault(name, {})
            for key, value in values.items():
                # The largest step count is right: a slice without a gradient in early steps counts too few.
                known[key] = max(known.get(key, value), value, key=_count)
    return {name: {key: _form(value) for key, value in values.items()} for name, values in result.items()}


def _described(name: str, key: str, value: object, part: Part) -> object:
    what = f"the optimizer's state {key!r} of {name}"
    assert part.key is not None
    if is_traceable_wrapper_subclass(value):
        raise CheckpointError(f"{what} is a {type(value).__name__}, which cannot be saved; plain tensors can")
    # Adam's step count is a 0-d tensor like a scalar parameter's moments, but it is not one value per element.
    if not isinstance(value, Tensor) or (not value.ndim and (part.key.ndim or key == "step")):
        return encode(value, what)
    if value.shape == own_shape(part.key):
        return "cut", value.dtype, tuple(part.layout.shape)
    if part.is_whole or part.is_owned:
        return "whole", value.dtype, tuple(value.shape)
    raise CheckpointError(
        f"{what} has the shape {list(value.shape)}, not that of the parameter, so the shards of "
        f"{list(own_shape(part.key))} cannot be joined; save it under a plan with tp=pp=ep=etp=1 and zero_stage=0"
    )


def _form(value: object) -> object:
    """Return the description of a tensor as a tuple again, and an encoded value as it is."""
    if not isinstance(value, list):
        return value
    kind, dtype, shape = value
    return kind, getattr(torch, dtype.removeprefix("torch.")), tuple(shape)


def _count(value: object) -> float:
    number = value["tensor"] if isinstance(value, dict) and "tensor" in value else value
    return number if isinstance(number, int | float) else 0


def _new_state(layout: TensorLayout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the state where a rank has none: of no element, or of a slice that never had a gradient.

    One device would have zeros.
    """
    return torch.zeros(layout.local_numel, dtype=dtype, device=device)


def _encoded_groups(found: OptimizerParts) -> list[ParameterGroup]:
    """Return the parameter names and the encoded options of each group.

    Raises:
        CheckpointError: if an option is neither a number nor a text.
    """
    return [
        {
            "parameters": names,
            "options": {
                key: encode(value, f"the option {key!r} of the optimizer's group {index}")
                for key, value in group.items()
                if key != "params"
            },
        }
        for index, (names, group) in enumerate(zip(found.groups, found.optimizer.param_groups, strict=True))
    ]


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
