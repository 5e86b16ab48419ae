"""Defines which elements of each parameter this rank's optimizer steps, and so which state the rank holds.

This is the only definition, under every plan: saving gathers the state by it, and loading slices the state by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import OptimizerMismatchError
from meshwright.layout.tensor_layout import TensorLayout, layout_if_any
from meshwright.mesh.axes import Mesh
from meshwright.optim.engine_state import check_no_engine
from meshwright.optim.runtime import Runtime, find_runtime


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """What this rank steps of one parameter.

    Args:
        layout: which elements of the parameter each rank steps.
        key: the tensor for this rank's elements in ``optimizer.state`` and the groups; None if it steps none.
        has_master: whether ``key`` is a float32 copy, which is stepped in place of half-precision weights.
    """

    layout: TensorLayout
    key: Tensor | None
    has_master: bool

    @property
    def is_whole(self) -> bool:
        """Whether every rank steps all of the parameter."""
        return not (self.layout.is_sharded or self.layout.is_staged)

    def layout_of_state(self, shape: Sequence[int]) -> TensorLayout:
        """Return the layout of a tensor of the state, which is whole on each rank if it has a shape of its own."""
        return self.layout if self.layout.shape == tuple(shape) else TensorLayout(shape=torch.Size(shape))


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerParts:
    """This rank's parts of all parameters of an optimizer, by the parameters' one-device names.

    Args:
        optimizer: the optimizer without its wrapper.
        runtime: the model's runtime, or a runtime of a single rank if the model is not distributed.
        parts: the parts by name.
        groups: the names of each group's parameters.
    """

    optimizer: Optimizer
    runtime: Runtime
    parts: dict[str, Part]
    groups: list[list[str]]


def parts_of(model: nn.Module, optimizer: Optimizer) -> OptimizerParts:
    """Return this rank's part of each of an optimizer's parameters.

    Args:
        model: the optimizer's model, distributed or not. The state uses the model's parameter names.
        optimizer: an optimizer of parameters of this model.

    Raises:
        OptimizerMismatchError: if the optimizer belongs to another model.
        CheckpointError: if an engine holds the model's state.
    """
    check_no_engine(model)
    optimizer = unwrapped(optimizer)
    runtime = _common_runtime(model, optimizer)
    zero = runtime.gradients.zero
    for one in zero.sharded if zero else ():
        one.weights.take_over()
    groups = zero.groups if zero else [group["params"] for group in optimizer.param_groups]
    names = {id(p): name for name, p in model.named_parameters()}
    shards = {id(piece.parameter): piece.shard for piece in (zero.slices if zero else ())}
    parts: dict[str, Part] = {}
    for parameter in (p for group in groups for p in group):
        name = names.get(id(parameter))
        if name is None:
            raise OptimizerMismatchError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's; pass the "
                "model and the optimizer that to_distributed returned"
            )
        layout, key = layout_if_any(parameter) or TensorLayout(shape=parameter.shape, name=name), parameter
        bucket = zero.bucket_of(parameter) if zero else None
        if bucket is not None:
            layout = bucket.layout(parameter)
            key = shards.get(id(parameter))
        parts[name] = Part(
            layout=layout,
            key=key if layout.is_held else None,
            has_master=bucket is not None and bucket.bucket.dtype != parameter.dtype,
        )
    return OptimizerParts(
        optimizer=optimizer, runtime=runtime, parts=parts, groups=[[names[id(p)] for p in group] for group in groups]
    )


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside of wrappers that have it as ``.optimizer``, such as accelerate's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _common_runtime(model: nn.Module, optimizer: Optimizer) -> Runtime:
    of_model, of_optimizer = find_runtime(model), find_runtime(optimizer)
    is_of_another = of_optimizer is not None and of_optimizer is not of_model
    if of_model is not None and (is_of_another or (of_model.gradients.zero is not None and of_optimizer is None)):
        raise OptimizerMismatchError(
            "this optimizer was not distributed with the model; pass both as to_distributed returned them"
        )
    return of_model or of_optimizer or Runtime(mesh=Mesh())
