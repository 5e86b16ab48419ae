"""Makes recipes for a model that was built on the meta device: records how a second model initialises itself."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.construct.deferred_init import record
from meshwright.construct.init_recording import Tape
from meshwright.errors import PlanError
from meshwright.layout.packed_weights import matrix_shape


def build_twin(model: nn.Module, *, draws: bool) -> nn.Module:
    """Build a second module with the names of ``model``, deferred weights and real buffers.

    A model that is built from its ``.config`` (as in transformers) is built again, so its weights are those that one
    process would draw from the current seed. Any other model is copied, and its modules' ``reset_parameters`` run in
    the order of ``modules()``.

    Args:
        model: a model built on the meta device.
        draws: whether weights will be drawn; if False, the generators do not advance.

    Raises:
        PlanError: if the config builds a model with other parameters.
    """
    if _is_built_from_config(model):
        twin = _from_config(model, draws)
        ours = {name: tuple(matrix_shape(p)) for name, p in model.named_parameters(remove_duplicate=False)}
        built = {name: tuple(p.shape) for name, p in twin.named_parameters(remove_duplicate=False)}
        if differing := sorted(name for name in ours.keys() | built.keys() if ours.get(name) != built.get(name)):
            shown = "\n  ".join(
                f"{n}: {ours.get(n)} in the model, {built.get(n)} from its config" for n in differing[:20]
            )
            raise PlanError(
                f"{type(model).__name__} is on the meta device, but its config builds another model: {len(differing)} "
                f"parameter(s) differ:\n  {shown}\nBuild and change it under meshwright.deferred_init() instead"
            )
        return twin
    return _reset_copy(model, draws)


def _is_built_from_config(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    if config is None or not hasattr(type(model), "config_class"):
        return False
    required = [
        parameter
        for parameter in inspect.signature(type(model)).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    return len(required) == 1


def _from_config(model: nn.Module, draws: bool) -> nn.Module:
    dtype = next((p.dtype for p in model.parameters() if p.is_meta and p.is_floating_point()), None)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype or previous)
    try:
        with torch.device("cpu"), record(Tape(draws)):
            made: nn.Module = type(model)(copy.deepcopy(model.config))
            return made
    finally:
        torch.set_default_dtype(previous)


def _reset_copy(model: nn.Module, draws: bool) -> nn.Module:
    twin = copy.deepcopy(model)
    with torch.no_grad(), record(Tape(draws)) as recorder:
        deferred: dict[int, Tensor] = {}

        def defer(tensor: Tensor | None) -> Any:
            if tensor is None or not tensor.is_meta:
                return tensor
            if id(tensor) not in deferred:
                values = recorder.adopt(tensor)
                is_parameter = isinstance(tensor, nn.Parameter)
                deferred[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
            return deferred[id(tensor)]

        metas = {name: x for name, x in twin.named_buffers() if x.is_meta}
        modules = [m for m in twin.modules() if any(x.is_meta for x in (*_own(m._parameters), *_own(m._buffers)))]
        for module in modules:
            for name, parameter in list(module._parameters.items()):
                module.register_parameter(name, defer(parameter))
            module._buffers.update({name: defer(buffer) for name, buffer in module._buffers.items()})
        for module in modules:
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        for name, buffer in metas.items():
            owner, _, suffix = name.rpartition(".")
            buffers = twin.get_submodule(owner)._buffers
            if not recorder.is_written(buffers[suffix]):
                buffers[suffix] = buffer
    return twin


def _own(tensors: dict[str, Any]) -> list[Tensor]:
    return [x for x in tensors.values() if x is not None]


def meta_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's meta tensors that are not parameters, by attribute."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return {name: x for name, x in {**module._buffers, **plain}.items() if x is not None and x.is_meta}
