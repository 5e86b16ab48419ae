"""Keeps the optimizer's state and float32 masters on the host, and steps them there (``offload="optimizer"``).

Gradients are reduced, summed up, scaled and clipped on the device, as without offload. For a step they are copied to
the host, bucket by bucket, beside the weights, in which the program may have written. The host steps a bucket while
the gradients of the next ones arrive and the weights of those before return::

    device   gradients, weights -> [ to the host ][ to the host ]     [ from it ][ from it ] -> all-gather
    host                                          [ step        ][ step        ]

Between steps the optimizer has slices without values on the device, whose gradients scalers and clipping find. During a
step it has the copies on the host, which are the keys of its state.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.optim.chained import members, stepping
from meshwright.optim.elementwise import ELEMENTWISE
from meshwright.optim.zero.segments import HostCopy, SideStream, on_host
from meshwright.optim.zero.zero_optimizer import ReduceScatter, ShardedBucket
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.parallel.shards.state_of_parts import open_state


class HostSteps:
    """The steps of an optimizer whose slices have copies on the host.

    Between steps the optimizer has the slices on the device, so that a scaler and clipping find their gradients. During
    a step it has the copies, which are the keys of its state.

    Args:
        optimizer: the optimizer, whose groups have the slices.
        reduction: ZeRO's reduction, whose buckets have copies on the host.
        whole: the indices of the groups whose parameters are stepped whole, which must have all gradients before.
    """

    def __init__(self, optimizer: Optimizer, reduction: ReduceScatter, whole: Sequence[int] = ()):
        self._optimizer, self._reduction, self._whole = optimizer, reduction, whole
        self._slices: list[list[nn.Parameter]] = []  # what each group has between steps
        self._options: list[_LentOption] = []
        self._sent: set[int] = set()  # the ids of the buckets whose stepped weights are on their way back
        self._side: SideStream | None = None

    def hook_begin(self) -> None:
        """Add the hook that begins a step, after those that settle the gradients."""
        self._optimizer.register_step_pre_hook(self._open)

    def hook_end(self) -> None:
        """Add the hook that ends a step, before those that publish what was stepped."""
        self._optimizer.register_step_post_hook(lambda *_: self.return_all())

    def lend(self) -> None:
        """Let the optimizer have the copies, in which :meth:`ReduceScatter.take_over` has put the newest values."""
        stepped = {id(piece.shard): piece.stepped for piece in self._reduction.slices}
        self._slices = [group["params"] for group in self._optimizer.param_groups]
        _set_parameters(self._optimizer, [[stepped[id(shard)] for shard in slices] for slices in self._slices])
        self._options = [
            _LentOption(group, name) for group in self._optimizer.param_groups for name in group if name != "params"
        ]

    def return_all(self) -> None:
        """Send all stepped weights back to the device, and let the optimizer have the slices again."""
        self.take_back()
        with torch.no_grad():
            for sharded in self._reduction.sharded:
                if id(sharded) not in self._sent:
                    _host(sharded).send()
        self._sent = set()
        for piece in self._reduction.slices:
            piece.stepped.grad = None

    def take_back(self) -> None:
        """Let the optimizer have the slices and its own options again."""
        if self._slices:
            _set_parameters(self._optimizer, self._slices)
        for option in self._options:
            option.take_back()
        self._slices, self._options = [], []

    def _open(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if any(callable(argument) for argument in (*args, *kwargs.values())):
            raise ValueError(
                f"{type(optimizer).__name__}.step(closure) computes gradients inside of the step, but under offload="
                "'optimizer' they are copied to the host before it. Call loss.backward(), and then optimizer.step()"
            )
        for each in stepping(optimizer):
            for name in ("grad_scale", "found_inf"):  # what a scaler leaves for a fused optimizer
                if isinstance(number := getattr(each, name, None), Tensor):
                    setattr(each, name, number.cpu())
        self._sent = set()
        self.lend()
        # The hooks of a chain's parts run when these step, and may change what is stepped.
        is_early = not any(each._optimizer_step_pre_hooks for each in members(optimizer) if each is not optimizer)
        with torch.no_grad(), reading_shards(), open_state(optimizer):
            arriving = [(sharded, self._fetch(sharded)) for sharded in self._reduction.sharded]
            for sharded, wait in arriving:
                wait()
                _host(sharded).take_in()
                for piece in sharded.slices:
                    if piece.shard.grad is not None:
                        piece.stepped.grad = _host(sharded).gradient[piece.in_shard]
                if is_early:
                    self._step_early(sharded)
        done = {id(p.stepped) for s in self._reduction.sharded if id(s) in self._sent for p in s.slices}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in done]

    def _fetch(self, sharded: ShardedBucket) -> Callable[[], None]:
        """Start to copy a bucket's weights and gradients to the host; return a function that waits for them."""
        host = _host(sharded)
        if self._side is None:
            self._side = SideStream(sharded.weights.master.device)
        gradients = [(p.in_shard, p.shard.grad) for p in sharded.slices if p.shard.grad is not None]
        return self._side.run(functools.partial(host.fetch, gradients))

    def _step_early(self, sharded: ShardedBucket) -> None:
        """Step a bucket while others arrive, if its optimizers are torch's, which step each parameter by itself."""
        own = {id(piece.stepped) for piece in sharded.slices}
        groups = self._optimizer.param_groups
        if any(id(p) in own for index in self._whole for p in groups[index]["params"]):
            return
        of_bucket = [[p for p in group["params"] if id(p) in own] for group in groups]
        found = [each for each in stepping(self._optimizer) if any(_has_any(group, own) for group in each.param_groups)]
        if not found or not all(type(each) in ELEMENTWISE for each in found):
            return
        lists = [group["params"] for group in groups]
        _set_parameters(self._optimizer, of_bucket)
        try:
            for each in found:
                inspect.unwrap(type(each).step)(each)  # without its hooks, which run once in each step
        finally:
            _set_parameters(self._optimizer, lists)
        _host(sharded).send()
        self._sent.add(id(sharded))


class _LentOption:
    """An option of a group, such as a learning rate in a tensor on the device, which a step on the host reads there.

    Args:
        group: the group, which has the option on the host until it is taken back.
        name: the name of the option.
    """

    def __init__(self, group: dict[str, object], name: str):
        self._group, self._name, self._own = group, name, group[name]
        self._lent = group[name] = on_host(self._own)

    def take_back(self) -> None:
        """Let the group have its own option again, with what the step wrote into it, unless the step replaced it."""
        if self._group.get(self._name) is self._lent:
            self._group[self._name] = self._own
            _write_back(self._lent, self._own)


def _write_back(lent: object, own: object) -> None:
    if isinstance(own, Tensor) and isinstance(lent, Tensor):
        if lent is not own and lent._version:  # written since it was copied
            own.detach().copy_(lent)
    elif isinstance(own, tuple | list) and isinstance(lent, tuple | list):
        for part, of_own in zip(lent, own, strict=True):
            _write_back(part, of_own)


def _has_any(group: dict[str, object], parameters: set[int]) -> bool:
    return any(id(parameter) in parameters for parameter in cast("list[nn.Parameter]", group["params"]))


def _set_parameters(optimizer: Optimizer, lists: list[list[nn.Parameter]]) -> None:
    for group, parameters in zip(optimizer.param_groups, lists, strict=True):
        group["params"] = parameters


def _host(sharded: ShardedBucket) -> HostCopy:
    assert sharded.host is not None
    return sharded.host
