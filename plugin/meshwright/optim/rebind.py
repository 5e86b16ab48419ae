"""Point a user's optimizer at the sharded parameters, keeping its groups and its state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import OptimizerMismatchError
from meshwright.parallel.layout import record_of


def check_ownership(model: nn.Module, optimizer: Optimizer) -> None:
    """Check that the optimizer steps parameters of this model.

    Raises:
        OptimizerMismatchError: for foreign parameters, or none at all.
    """
    own = {id(p) for p in model.parameters()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in given if id(p) not in own]
    if not given:
        raise OptimizerMismatchError("the optimizer has no parameters; build it from model.parameters()")
    if foreign:
        raise OptimizerMismatchError(
            f"{len(foreign)} of the optimizer's {len(given)} parameters are not the model's (the first has shape "
            f"{tuple(foreign[0].shape)}); build the optimizer from the parameters of the model you pass"
        )


def rebind(optimizer: Optimizer, replaced: dict[int, nn.Parameter]) -> None:
    """Replace each parameter of the optimizer by its shard, and shard the state it already has.

    Args:
        optimizer: changed in place, so that schedulers made for it keep working.
        replaced: ``id`` of the old parameter -> its shard, with a record.
    """
    state: dict[Any, Any] = {}
    for group in optimizer.param_groups:
        for i, old in enumerate(group["params"]):
            new = replaced[id(old)]
            if old in optimizer.state:
                state[new] = {key: _shard_state(value, new) for key, value in optimizer.state[old].items()}
            group["params"][i] = new
    optimizer.state.clear()
    optimizer.state.update(state)


def _shard_state(value: Any, parameter: nn.Parameter) -> Any:
    record = record_of(parameter)
    if isinstance(value, Tensor) and value.shape == record.global_shape and value.ndim:
        return record.layout.take(value, record.rank).to(parameter.device)
    return value.to(parameter.device) if torch.is_tensor(value) and value.ndim else value
