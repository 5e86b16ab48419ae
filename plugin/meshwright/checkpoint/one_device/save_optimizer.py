"""Writes the optimizer's state in one-device form, which load_optimizer.py reads under any plan.

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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint.files import disk
from meshwright.checkpoint.one_device.gather_tensor import assemble, is_first
from meshwright.checkpoint.one_device.optimizer_manifest import OptimizerManifest, encode, master_key, state_key
from meshwright.checkpoint.one_device.safetensors_file import Form, num_bytes
from meshwright.checkpoint.one_device.streamed_files import StreamedFiles, parse_bytes, split, stream
from meshwright.compiling import without_compilation
from meshwright.errors import CheckpointError, PlanError
from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.together import exchange_together, on_first_rank, succeed_together, texts_of_all
from meshwright.optim.runtime import device_of
from meshwright.optim.state_parts import OptimizerParts, Part, parts_of

_FILE = re.compile(r"optimizer-[0-9a-f]{8}(-\d{5}-of-\d{5})?\.safetensors")

State = dict[str, dict[str, Any]]  # by parameter, then by key: ("cut" | "whole", dtype, shape) or an encoded value


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
    own, texts = exchange_together(lambda: with_own_text(model, optimizer))
    succeed_together(lambda: _check_writer(own))
    found, state = of_all(own, texts)
    forms = tensor_forms(found, state)
    most = succeed_together(lambda: parse_bytes(max_shard_size))
    folder = Path(directory)
    stem = on_first_rank(lambda: _new_stem(folder))
    sizes = {name: num_bytes(form) for name, form in forms.items()}
    files = {file: {name: forms[name] for name in names} for file, names in split(stem, sizes, most).items() if names}
    manifest = succeed_together(lambda: describe_optimizer(found, state, encoded_groups(found), files))

    is_writer = is_first(found.runtime) and (not dist.is_initialized() or dist.get_rank() == 0)
    written = StreamedFiles(folder, files, f"writing {folder}") if is_writer else None
    stream(files, functools.partial(_gather, found, saved_tensors(found, state), forms, device_of(model)), written)
    on_first_rank(lambda: _finish(folder, manifest, written) if written is not None else None)


def shared_parts(model: nn.Module, optimizer: Optimizer) -> OptimizerParts:
    """Return this rank's parts of an optimizer's parameters, with ``has_master`` as it is on all stages together.

    Every rank must make the call.

    Raises:
        OptimizerMismatchError: if the optimizer belongs to another model.
    """
    found = succeed_together(lambda: parts_of(model, optimizer))
    if found.runtime.mesh.pp.size == 1:
        return found
    return _with_masters(found, [json.loads(text) for text in texts_of_all(json.dumps(_own_masters(found)))])


def _own_masters(found: OptimizerParts) -> list[str]:
    return [name for name, part in found.parts.items() if part.has_master]


def _with_masters(found: OptimizerParts, of_ranks: list[list[str]]) -> OptimizerParts:
    masters = {name for names in of_ranks for name in names}
    parts = {name: dataclasses.replace(part, has_master=name in masters) for name, part in found.parts.items()}
    return dataclasses.replace(found, parts=parts)


def _check_writer(found: OptimizerParts) -> None:
    if dist.is_initialized() and dist.get_rank() == 0 and not is_first(found.runtime):
        raise PlanError(
            f"rank 0 writes, but has place {found.runtime.mesh.tokens.rank} on the axis 'dp' and "
            f"{found.runtime.mesh.tp.rank} on 'tp', and only the rank with place 0 on both gets whole tensors; use a "
            "mesh that starts with rank 0"
        )


def with_own_text(model: nn.Module, optimizer: Optimizer) -> tuple[OptimizerParts, str]:
    """Return this rank's parts of an optimizer's parameters, and what :func:`of_all` needs of each rank.

    Raises:
        OptimizerMismatchError: if the optimizer belongs to another model.
        CheckpointError: if state is neither a tensor nor a number.
    """
    found = parts_of(model, optimizer)
    return found, own_text(found, own_state(found))


def own_text(found: OptimizerParts, state: State) -> str:
    """Return what :func:`of_all` needs of a rank with this state."""
    return json.dumps({"masters": _own_masters(found), "state": state}, default=str)


def of_all(found: OptimizerParts, texts: list[str]) -> tuple[OptimizerParts, State]:
    """Return this rank's parts with ``has_master`` as it is on all ranks together, and a description of their state.

    Under ZeRO each rank has the state of its slices only, and under pp of the parameters of its stage.

    Args:
        found: this rank's parts.
        texts: the texts of all ranks.
    """
    of_ranks = [json.loads(text) for text in texts]
    return _with_masters(found, [each["masters"] for each in of_ranks]), _merged(each["state"] for each in of_ranks)


def _merged(states: Iterable[State]) -> State:
    result: State = {}
    for state in states:
        for name, values in state.items():
            known = result.setdefault(name, {})
            for key, value in values.items():
                # The largest step count is right: a slice without a gradient in early steps counts too few.
                known[key] = max(known.get(key, value), value, key=_count)
    return {name: {key: _form(value) for key, value in values.items()} for name, values in result.items()}


def own_state(found: OptimizerParts) -> State:
    """Return a description of this rank's state, with the values of what is not a tensor.

    Raises:
        CheckpointError: if state is neither a tensor nor a number.
    """
    return {
        name: {key: _described(name, key, value, part) for key, value in found.optimizer.state[part.key].items()}
        for name, part in found.parts.items()
        if part.key is not None and part.key in found.optimizer.state
    }


def _described(name: str, key: str, value: Any, part: Part) -> Any:
    what = f"the optimizer's state {key!r} of {name}"
    assert part.key is not None
    # Adam's step count is a 0-d tensor like a scalar parameter's moments, but it is not one value per element.
    if not isinstance(value, Tensor) or (not value.ndim and (part.key.ndim or key == "step")):
        return encode(value, what)
    if value.shape == part.key.shape:
        return "cut", value.dtype, tuple(part.layout.shape)
    if part.is_whole:
        return "whole", value.dtype, tuple(value.shape)
    raise CheckpointError(
        f"{what} has the shape {list(value.shape)}, not that of the parameter, so the shards of "
        f"{list(part.key.shape)} cannot be joined; save it under a plan with tp=1 and zero_stage=0"
    )


def _form(value: Any) -> Any:
    """Return the description of a tensor as a tuple again, and an encoded value as it is."""
    if not isinstance(value, list):
        return value
    kind, dtype, shape = value
    return kind, getattr(torch, dtype.removeprefix("torch.")), tuple(shape)


def _count(value: Any) -> float:
    number = value["tensor"] if isinstance(value, dict) and "tensor" in value else value
    return number if isinstance(number, int | float) else 0


def saved_tensors(found: OptimizerParts, state: State) -> dict[str, tuple[str, str | None]]:
    """Return the parameter and the state key of each tensor to save; the key of a master weight is None."""
    masters = {master_key(name): (name, None) for name, part in found.parts.items() if part.has_master}
    return masters | {
        state_key(name, key): (name, key)
        for name in found.parts
        for key, value in state.get(name, {}).items()
        if isinstance(value, tuple)
    }


def tensor_forms(found: OptimizerParts, state: State) -> dict[str, Form]:
    forms: dict[str, Form] = {}
    for tensor, (name, key) in saved_tensors(found, state).items():
        shape = tuple(found.parts[name].layout.shape)
        forms[tensor] = (torch.float32, shape) if key is None else state[name][key][1:]
    # Wide dtypes first, so that every tensor is aligned in its file.
    return dict(sorted(forms.items(), key=lambda item: -item[1][0].itemsize))


def _gather(
    found: OptimizerParts,
    tensors: dict[str, tuple[str, str | None]],
    forms: dict[str, Form],
    device: torch.device,
    tensor: str,
) -> Tensor | None:
    part = found.parts[tensors[tensor][0]]
    value = _local_values(found, tensors[tensor], forms[tensor], device)
    return assemble(value.reshape(-1), part.layout_of_state(forms[tensor][1]), found.runtime.mesh)


def _local_values(found: OptimizerParts, tensor: tuple[str, str | None], form: Form, device: torch.device) -> Tensor:
    """Return this rank's elements of a tensor of the optimizer's state; the key of a master weight is None."""
    name, key = tensor
    part = found.parts[name]
    if key is None:
        value = part.key
    else:
        value = found.optimizer.state.get(part.key, {}).get(key) if part.key is not None else None
    return new_state(part, form[0], device) if value is None else value.detach()


def new_state(part: Part, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the state where a rank has none: of no element, or of a slice that never had a gradient.

    One device would have zeros.
    """
    return torch.zeros(part.layout.local_numel, dtype=dtype, device=device)


def _new_stem(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return f"optimizer-{uuid.uuid4().hex[:8]}"


def encoded_groups(found: OptimizerParts) -> list[dict[str, Any]]:
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


def describe_optimizer(
    found: OptimizerParts, state: State, groups: list[dict[str, Any]], files: dict[str, dict[str, Form]]
) -> OptimizerManifest:
    are_tensors = {name: [key for key, v in values.items() if isinstance(v, tuple)] for name, values in state.items()}
    return OptimizerManifest(
        optimizer=type(found.optimizer).__name__,
        shapes={name: list(part.layout.shape) for name, part in found.parts.items()},
        groups=groups,
        tensors=are_tensors,
        values={
            name: {key: v for key, v in values.items() if key not in are_tensors[name]}
            for name, values in state.items()
        },
        masters=[name for name, part in found.parts.items() if part.has_master],
        weight_map={name: file for file, forms in files.items() for name in forms},
    )


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
