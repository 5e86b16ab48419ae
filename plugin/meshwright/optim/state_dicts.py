"""The state of sharded models and optimizers: ``state_dict``, ``load_state_dict``, and the sharding of a state that
exists.

``state_dict()`` raises. It cannot gather, since usually only one rank calls it. A model's ``load_state_dict()`` takes
whole tensors on every rank, and each rank keeps its rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import AlreadyDistributedError, OptimizerMismatchError, UnreadableTensorError
from meshwright.facts import Facts
from meshwright.layout.tensor_layout import TensorLayout, layout_if_any, layout_of
from meshwright.optim.chained import members
from meshwright.optim.runtime import Runtime
from meshwright.parallel.shards.partial_gradients import Window
from meshwright.parallel.shards.stand_in import own_shape, reading_shards
from meshwright.parallel.shards.state_of_parts import close_state
from meshwright.temporarily import temporarily


def guard_model(facts: Facts, runtime: Runtime) -> None:
    """Make ``model.state_dict()`` raise if it would hold shards, and ``model.load_state_dict()`` shard whole tensors.

    Args:
        facts: what the model shows, whose parameters have layouts.
        runtime: the model's runtime. If it has an engine, nothing changes, since the engine saves and loads shards.
    """
    if runtime.engine is not None:
        return
    calls = runtime.features.add(StateDictCalls())
    for module in facts.names:
        if next(module.parameters(recurse=False), None) is not None:
            hooks = _ModuleState(module, runtime, calls)
            module.register_state_dict_pre_hook(hooks.refuse_shards)
            module.register_load_state_dict_pre_hook(hooks.take_own)
            module.register_load_state_dict_post_hook(hooks.finish)


def guard_optimizer(optimizer: Optimizer, runtime: Runtime) -> None:
    """Make what reads an optimizer's state, or sets or copies it, raise if this rank has a part of it.

    These are ``state_dict()``, ``load_state_dict()``, ``copy.deepcopy`` and reads of ``optimizer.state``.
    """
    optimizers = [optimizer, *(x for x in members(optimizer) if x is not optimizer)]
    what = _part_of(optimizer, runtime)
    if what is not None:
        close_state(optimizers, what)
    for each in optimizers:
        each.register_state_dict_pre_hook(functools.partial(_raise_for_part, runtime, "state_dict"))
        each.register_load_state_dict_pre_hook(functools.partial(_raise_for_part, runtime, "load_state_dict"))
        if what is not None:  # torch leaves the hooks out of a copy, so it could not step parts
            each.__dict__["__deepcopy__"] = functools.partial(_refuse_copy, type(each).__name__)


@dataclass
class StateDictCalls:
    """What the calls of ``state_dict()`` are for.

    Args:
        names_only: whether it is now called only for its names, by a save that has the values already.
    """

    names_only: bool = False

    def reading_names(self) -> contextlib.AbstractContextManager[None]:
        """Make ``state_dict()`` return shards inside this context, instead of raising."""
        return temporarily(self, names_only=True)


class _ModuleState:
    """The hooks of one module that has parameters of its own."""

    def __init__(self, module: nn.Module, runtime: Runtime, calls: StateDictCalls):
        self.module, self.runtime, self.calls = module, runtime, calls
        self.window = Window(())
        self.left_out: set[str] = set()  # values of parameters that other pipeline stages hold

    def refuse_shards(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if keep_vars or self.calls.names_only:  # the caller wants the names or the objects, not the values
            return
        weights = self.runtime.weights
        for name, parameter in module.named_parameters(recurse=False):
            if weights is not None and weights.holds(parameter):
                what = f"under ZeRO stage 3 no rank has the values of {prefix}{name} outside of its layer"
            elif not layout_of(parameter).is_held:
                what = f"another pipeline stage holds {prefix}{name}"
            elif layout_of(parameter).is_sharded:
                what = (
                    f"this rank holds a shard {list(own_shape(parameter))} of {prefix}{name} "
                    f"{list(layout_of(parameter).shape)}"
                )
            else:
                continue
            raise UnreadableTensorError(
                f"{what}, so model.state_dict() would hold a part of the model, and every rank that loads it would "
                "get the weights of the rank that saved it. On all ranks call meshwright.full_state_dict(model), "
                "model.save_pretrained(folder) or meshwright.save_weights(model, folder)"
            )

    def take_own(
        self,
        module: nn.Module,
        state: dict[str, object],
        prefix: str,
        local_metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Replace each whole tensor with this rank's shard before torch copies it."""
        if local_metadata.get("assign_to_params_buffers", False):
            raise UnreadableTensorError(
                "load_state_dict(assign=True) would replace the parameters that meshwright synchronises, so each rank "
                "would train the new ones alone. Use load_state_dict(state), which copies"
            )
        weights = self.runtime.weights
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            key, layout = prefix + name, layout_of(parameter)
            value = state.get(key)
            is_held = weights is not None and weights.holds(parameter)
            if not isinstance(value, Tensor) or not (layout.is_sharded or is_held):
                continue
            if value.shape != layout.shape:
                error_msgs.append(_mismatch(key, value, parameter, layout))
                own = None
            elif not layout.is_held:
                self.left_out.add(key)
                del state[key]
                continue
            else:
                own = layout.take(value.detach()).to(parameter.device, parameter.dtype)
            if weights is not None and is_held:
                # torch copies into the parameter, which needs memory until the copy is done.
                with reading_shards():
                    weights.lend_memory(parameter, own)
            with reading_shards():
                state[key] = parameter.data if own is None else own
        self.window = Window(module.parameters(recurse=False))
        self.window.open()

    def finish(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.window.close()
        if self.left_out:
            incompatible_keys.missing_keys[:] = [k for k in incompatible_keys.missing_keys if k not in self.left_out]
            self.left_out = set()
        if (weights := self.runtime.weights) is not None:
            with reading_shards():
                for parameter in module.parameters(recurse=False):
                    weights.take_back_memory(parameter)


def _mismatch(key: str, value: Tensor, parameter: Tensor, layout: TensorLayout) -> str:
    if value.shape == own_shape(parameter):
        return (
            f"{key} in the state dict is one rank's shard {list(value.shape)}, but the whole tensor "
            f"{list(layout.shape)} is needed. On all ranks call meshwright.full_state_dict(model), and save that"
        )
    return (
        f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, the shape in current "
        f"model is {layout.shape}."
    )


def _refuse_copy(name: str, memo: dict[int, object]) -> None:
    raise AlreadyDistributedError(
        f"copy.deepcopy of this {name} would step copies of this rank's parts of the parameters, which reach no model. "
        f"Give a copy of the model an optimizer of its own: other = copy.deepcopy(model), make a new {name} of other's "
        "parameters, and call to_distributed(other, new). To keep the state, call meshwright.save_optimizer(model, "
        "optimizer, folder) on all ranks, and later meshwright.load_optimizer"
    )


_OF_OPTIMIZER = {
    "state_dict": "hold a part of the state, and every rank that loads it would get the state of the rank that saved "
    "it. On all ranks call meshwright.save_optimizer(model, optimizer, folder), and later "
    "meshwright.load_optimizer(model, optimizer, folder) under any plan",
    "load_state_dict": "replace this rank's part with whole tensors or another rank's part. Load a one-device state "
    "before to_distributed, which keeps it; or on all ranks call meshwright.load_optimizer(model, optimizer, folder) "
    "on a folder that meshwright.save_optimizer wrote",
}


def _raise_for_part(runtime: Runtime, call: str, optimizer: Optimizer, *_: object) -> None:
    if (what := _part_of(optimizer, runtime)) is not None:
        raise UnreadableTensorError(f"{what}, so optimizer.{call}() would {_OF_OPTIMIZER[call]}")


def _part_of(optimizer: Optimizer, runtime: Runtime) -> str | None:
    """Return a text that says why this rank's state is only a part; None if the state is whole."""
    if runtime.gradients.zero is not None:
        slices = runtime.mesh.tokens.size
        return f"under ZeRO this rank holds only one of the {slices} slices of the optimizer's state"
    if runtime.mesh.pp.size > 1:
        return f"each of the {runtime.mesh.pp.size} pipeline ranks holds the state of its own stages"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    layouts = [layout_if_any(p) for p in parameters]
    if any(layout is not None and layout.is_sharded for layout in layouts):
        return "each rank holds the state of its own shards"
    return None


def check_ownership(model: nn.Module | Facts, optimizer: Optimizer) -> None:
    """Check that the optimizer steps parameters of this model.

    Raises:
        OptimizerMismatchError: if the optimizer has no parameters, has one twice, or has one of another model; or if it
            steps another optimizer, which it wraps, and is none itself.
    """
    if "_optimizer_state_dict_pre_hooks" not in vars(optimizer):  # torch's Optimizer.__init__ sets it
        kind = type(optimizer).__name__
        raise OptimizerMismatchError(
            f"this {kind} has not called Optimizer.__init__, as wrappers of another optimizer do, so it lacks what the "
            "call hooks into. Pass the optimizer inside, and wrap what the call returns: model, inner, loader = "
            f"meshwright.to_distributed(model, inner, loader); optimizer = {kind}(inner)"
        )
    names = {id(p): name for name, p in reversed(Facts.of(model).parameters.items())}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in given if id(p) not in names]
    if not given:
        raise OptimizerMismatchError("the optimizer has no parameters; build it from model.parameters()")
    if foreign:
        raise OptimizerMismatchError(
            f"{len(foreign)} of the optimizer's {len(given)} parameters are not the model's (the first has shape "
            f"{tuple(foreign[0].shape)}); build the optimizer from the parameters of the model you pass"
        )
    if repeated := len(given) - len({id(p) for p in given}):
        first = next(p for i, p in enumerate(given) if any(p is other for other in given[:i]))
        raise OptimizerMismatchError(
            f"the optimizer has {repeated} parameter(s) more than once (the first is {names[id(first)]}), so each step "
            "would change them several times; pass each parameter once, in one group"
        )


def shard_state(optimizer: Optimizer, *, whole: Sequence[int] = ()) -> None:
    """Shard the existing state of an optimizer in place. Its parameters must be shards, with layouts.

    Args:
        optimizer: the optimizer.
        whole: the indices of the groups whose parameters are stepped whole, so that their state stays as it is.
    """
    for group in (group for index, group in enumerate(optimizer.param_groups) if index not in whole):
        for parameter in group["params"]:
            if parameter in optimizer.state:
                state = optimizer.state[parameter]
                state.update({key: _shard_value(value, parameter) for key, value in state.items()})


def _shard_value(value: object, parameter: nn.Parameter) -> object:
    layout = layout_of(parameter)
    if isinstance(value, Tensor) and value.shape == layout.shape and value.ndim:
        return layout.take(value).to(parameter.device)
    return value.to(parameter.device) if torch.is_tensor(value) and value.ndim else value
