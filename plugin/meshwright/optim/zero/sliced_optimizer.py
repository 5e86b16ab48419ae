"""Puts ZeRO's slices in the place of an optimizer's parameters, and makes its steps use them."""

from __future__ import annotations

import types

import torch
from torch.optim import Optimizer

from meshwright.errors import OptimizerMismatchError
from meshwright.optim.chained import groups_of, members
from meshwright.optim.zero.zero_optimizer import ReduceScatter, ShardedBucket, Slice
from meshwright.parallel.shards.reads import own_shape


def bind_optimizer(optimizer: Optimizer, reduction: ReduceScatter) -> None:
    """Empty an optimizer's groups, so that :func:`step_slices` can put slices in the place of the parameters.

    Args:
        optimizer: the optimizer, which is changed in place.
        reduction: the reduction, which stores the optimizer's groups.
    """
    reduction.groups = [list(group["params"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []


def step_slices(optimizer: Optimizer, reduction: ReduceScatter, new: list[ShardedBucket]) -> None:
    """Put this rank's slices of new parameters into their groups, with the state that the parameters already have.

    Args:
        optimizer: an optimizer bound by :func:`bind_optimizer`, which is changed in place.
        reduction: the reduction, which stores the optimizer's groups.
        new: buckets of parameters that were not stepped before.
    """
    pieces = [piece for sharded in new for piece in sharded.slices]
    for group, parameters in zip(optimizer.param_groups, reduction.groups, strict=True):
        members = {id(p) for p in parameters}
        for piece in pieces:
            if id(piece.parameter) in members:
                group["params"].append(piece.shard)
                if piece.parameter in optimizer.state:
                    state = optimizer.state[piece.parameter].items()
                    optimizer.state[piece.stepped] = {key: _slice_state(value, piece) for key, value in state}
    for sharded in new:
        for parameter in sharded.bucket.parameters:
            optimizer.state.pop(parameter, None)


def _slice_state(value: object, piece: Slice) -> object:
    if torch.is_tensor(value) and value.shape == own_shape(piece.parameter) and value.ndim:
        return piece.layout.own(value).to(piece.stepped.device, piece.stepped.dtype).clone()
    if not torch.is_tensor(value):
        return value
    return value.clone() if piece.stepped is piece.shard else value.to(piece.stepped.device, copy=True)


def hook_optimizer(optimizer: Optimizer, reduction: ReduceScatter) -> None:
    """Make the steps of a bound optimizer use the reduced gradients and update the model."""

    def prepare(*_: object) -> None:
        for sharded in reduction.sharded:
            sharded.weights.take_over()
        reduction.settle()

    optimizer.register_step_pre_hook(prepare)

    def publish(*_: object) -> None:
        reduction.is_uneven = False
        reduction.publish()

    optimizer.register_step_post_hook(publish)

    def add_param_group(self: Optimizer, param_group: dict[str, object]) -> None:
        raise OptimizerMismatchError("parameters cannot be added to a sharded optimizer; add them before sharding it")

    for each in {optimizer, *members(optimizer)}:
        clear = _ClearGradients(reduction, groups_of(each, optimizer))
        each.zero_grad = types.MethodType(clear, each)  # type: ignore[method-assign]
        each.add_param_group = types.MethodType(add_param_group, each)  # type: ignore[method-assign]


class _ClearGradients:
    """Clears the gradients of the parameters of some of an optimizer's groups, in the place of ``zero_grad``."""

    def __init__(self, reduction: ReduceScatter, groups: list[int]):
        self._reduction, self._groups = reduction, groups

    def __call__(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        parameters = (p for index in self._groups for p in self._reduction.groups[index])
        self._reduction.clear(parameters, set_to_none=set_to_none)
