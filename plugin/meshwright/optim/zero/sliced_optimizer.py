"""Puts ZeRO's slices in the place of an optimizer's parameters, and makes its steps use them."""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import OptimizerMismatchError
from meshwright.optim.chained import groups_of, members
from meshwright.optim.zero.zero_optimizer import ReduceScatter, ShardedBucket, Slice
from meshwright.parallel.shards.stand_in import own_shape
from meshwright.parallel.shards.state_of_parts import open_state


def bind_optimizer(optimizer: Optimizer, reduction: ReduceScatter) -> None:
    """Store an optimizer's groups, whose parameters slices replace in each step.

    Args:
        optimizer: the optimizer.
        reduction: the reduction, which stores them.
    """
    reduction.groups = [list(group["params"]) for group in optimizer.param_groups]
    reduction.shards = [[] for _ in optimizer.param_groups]


class LentSlices:
    """Lets an optimizer have this rank's slices in the place of the model's parameters.

    Between steps it has the parameters, as on one device, so that what a program does with those of its groups reaches
    the model, or raises what the same does with the model's own.

    Args:
        optimizer: the optimizer.
        reduction: the reduction, which has the slices.
    """

    def __init__(self, optimizer: Optimizer, reduction: ReduceScatter):
        self._optimizer, self._reduction = optimizer, reduction
        self._own: list[list[nn.Parameter]] = []

    def __enter__(self) -> None:
        self._own = [group["params"] for group in self._optimizer.param_groups]
        for group, shards in zip(self._optimizer.param_groups, self._reduction.shards, strict=True):
            group["params"] = shards

    def __exit__(self, *_: object) -> None:
        for group, parameters in zip(self._optimizer.param_groups, self._own, strict=False):
            group["params"] = parameters
        self._own = []


def step_slices(optimizer: Optimizer, reduction: ReduceScatter, new: list[ShardedBucket]) -> None:
    """Let an optimizer step this rank's slices of new parameters, with the state that the parameters already have.

    Args:
        optimizer: an optimizer bound by :func:`bind_optimizer`, which is changed in place.
        reduction: the reduction, which stores the optimizer's groups.
        new: buckets of parameters that were not stepped before.
    """
    pieces = [piece for sharded in new for piece in sharded.slices]
    with open_state(optimizer) as state:
        for shards, parameters in zip(reduction.shards, reduction.groups, strict=True):
            members = {id(p) for p in parameters}
            for piece in pieces:
                if id(piece.parameter) in members:
                    shards.append(piece.shard)
                    if piece.parameter in state:
                        own = state[piece.parameter].items()
                        state[piece.stepped] = {key: _slice_state(value, piece) for key, value in own}
        for sharded in new:
            for parameter in sharded.bucket.parameters:
                state.pop(parameter, None)


def _slice_state(value: object, piece: Slice) -> object:
    if torch.is_tensor(value) and value.shape == own_shape(piece.parameter) and value.ndim:
        return piece.layout.own(value).to(piece.stepped.device, piece.stepped.dtype).clone()
    if not torch.is_tensor(value):
        return value
    return value.clone() if piece.stepped is piece.shard else value.to(piece.stepped.device, copy=True)


def hook_optimizer(optimizer: Optimizer, reduction: ReduceScatter) -> Callable[[], None]:
    """Make the steps of a bound optimizer use the reduced gradients and update the model.

    Returns:
        A function that ends a step that raised: what it made of the slices is published by the next one.
    """
    lent = LentSlices(optimizer, reduction)

    def prepare(*_: object) -> None:
        for sharded in reduction.sharded:
            sharded.weights.take_over()
        reduction.settle()
        lent.__enter__()

    optimizer.register_step_pre_hook(prepare)

    def publish(*_: object) -> None:
        lent.__exit__()
        reduction.is_uneven = False
        reduction.publish()

    optimizer.register_step_post_hook(publish)

    def add_param_group(self: Optimizer, param_group: dict[str, object]) -> None:
        raise OptimizerMismatchError(
            "add_param_group after the call: ZeRO has replaced this optimizer's parameters by this rank's slices and "
            "reduces gradients into these, so parameters of a later group would not be stepped. Make all groups first, "
            "optimizer.add_param_group({'params': [...], 'lr': 0.0}) and then to_distributed(model, optimizer, ...), "
            "and set their lr when they are to train; or use zero_stage=0"
        )

    for each in {optimizer, *members(optimizer)}:
        clear = _ClearGradients(reduction, groups_of(each, optimizer))
        each.zero_grad = types.MethodType(clear, each)  # type: ignore[method-assign]
        each.add_param_group = types.MethodType(add_param_group, each)  # type: ignore[method-assign]
    return lent.__exit__


class _ClearGradients:
    """Clears the gradients of the parameters of some of an optimizer's groups, in the place of ``zero_grad``."""

    def __init__(self, reduction: ReduceScatter, groups: list[int]):
        self._reduction, self._groups = reduction, groups

    def __call__(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        parameters = (p for index in self._groups for p in self._reduction.groups[index])
        self._reduction.clear(parameters, set_to_none=set_to_none)
