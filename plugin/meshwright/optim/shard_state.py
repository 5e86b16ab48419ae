"""Shards the state of a user's optimizer whose parameters have become shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import OptimizerMismatchError
from meshwright.facts import Facts
from meshwright.layout.tensor_layout import layout_of


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
