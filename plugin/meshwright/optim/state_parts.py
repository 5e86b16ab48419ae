"""Defines which elements of each parameter this rank's optimizer steps, and so which state the rank holds.

This is the only definition, under every plan: saving gathers the state by it, and loading slices the state by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import OptimizerMismatchError
from meshwright.layout.row_layout import RowLayout, Span
from meshwright.layout.tensor_layout import TensorLayout, layout_if_any
from meshwright.mesh.axes import Mesh
from meshwright.optim.engine_state import check_no_engine
from meshwright.optim.runtime import Runtime, find_runtime


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """This rank's part of one parameter.

    Args:
        record: the layout of the parameter.
        cut: the layout of the flattened TP shard over dp: the elements that each data-parallel rank steps. It is
            replicated if each rank steps all elements.
        own: this rank's span of the flattened TP shard.
        key: the tensor for this part in ``optimizer.state`` and the groups; None if this rank steps no element.
        has_master: whether ``key`` is a float32 copy, which is stepped in place of half-precision weights.
        is_whole: whether every rank steps all of the parameter.
    """

    record: TensorLayout
    cut: RowLayout
    own: Span
    key: Tensor | None
    has_master: bool
    is_whole: bool


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
    sharded = {id(p): bucket for bucket in (zero.sharded if zero else ()) for p in bucket.bucket.parameters}
    slices = {id(piece.parameter): piece.shard for bucket in (zero.sharded if zero else ()) for piece in bucket.slices}
    groups = zero.groups if zero else [group["params"] for group in optimizer.param_groups]
    names = {id(p): name for name, p in model.named_parameters()}
    parts: dict[str, Part] = {}
    for parameter in (p for group in groups for p in group):
        name = names.get(id(parameter))
        if name is None:
            raise OptimizerMismatchError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's; pass the "
                "model and the optimizer that to_distributed returned"
            )
        bucket = sharded.get(id(parameter))
        cut = (
            bucket.cut(parameter) if bucket else RowLayout.replicated(parameter.shape.numel(), runtime.mesh.tokens.size)
        )
        record = _record(name, parameter)
        parts[name] = Part(
            record=record,
            cut=cut,
            own=cut.spans[runtime.mesh.tokens.rank][0] if record.is_held else (0, 0),
            key=None if not record.is_held else slices.get(id(parameter)) if bucket else parameter,
            has_master=bucket is not None and bucket.bucket.dtype != parameter.dtype,
            is_whole=not record.is_sharded and cut.is_replicated and runtime.mesh.pp.size == 1,
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


def _record(name: str, parameter: nn.Parameter) -> TensorLayout:
    return layout_if_any(parameter) or TensorLayout(shape=parameter.shape, name=name)
