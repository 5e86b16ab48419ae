"""What each rank has of an optimizer's state, under the names and in the shapes of one device."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from meshwright.checkpoint.one_device.optimizer_manifest import (
    OptimizerManifest,
    ParameterGroup,
    encode,
    master_key,
    state_key,
)
from meshwright.checkpoint.one_device.safetensors_file import Form
from meshwright.errors import CheckpointError
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.optim.owners import OptimizerParts, Part, parts_of
from meshwright.parallel.shards.stand_in import own_shape
from meshwright.parallel.shards.state_of_parts import state_of

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
        masters = {name for each in of_ranks for name in each["masters"]}
        parts = {name: dataclasses.replace(p, has_master=name in masters) for name, p in self.found.parts.items()}
        found = dataclasses.replace(self.found, parts=parts)
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

    def manifest(self) -> OptimizerManifest:
        """Return all but the tensors."""
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
        )


def _masters(found: OptimizerParts) -> list[str]:
    return [name for name, part in found.parts.items() if part.has_master]


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
