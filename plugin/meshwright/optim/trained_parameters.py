"""Tracks ``requires_grad`` during training, so that thawed parameters are reduced and stepped like all others."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.layout.tensor_layout import layout_of
from meshwright.mesh.axes import Axis
from meshwright.optim.runtime import Runtime
from meshwright.optim.zero.segments import EqualSlices, stepped_over
from meshwright.optim.zero.sliced_optimizer import bind_optimizer, step_slices
from meshwright.optim.zero.zero_optimizer import ReduceScatter, ShardedBucket, lay_out
from meshwright.parallel.gradients.buckets import make_buckets
from meshwright.parallel.gradients.gradient_hooks import GradientHooks
from meshwright.parallel.gradients.sync import AllReduce, GradientSync
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.plan.parts import IN_FLIGHT


class TrainedParameters:
    """The parameters of a model that were ever trainable, and how each of them is reduced and stepped.

    As soon as a parameter is trainable, it gets a place in a bucket and, under ZeRO, a slice of the optimizer's state.
    If the parameter is frozen later, it keeps both and gets no gradients.

    Args:
        parameters: the parameters of the model, which have layouts.
        optimizer: the optimizer of those parameters, if any.
        runtime: the model's runtime, whose ``syncs`` this class fills; under stage 3 its ``weights`` are attached.
        zero_stage: 0 to 3; on one data-parallel rank, 2 and 3 act as 1.
        bucket_bytes: size of the buckets in which gradients are reduced.

    Attributes:
        parameters: all parameters that were ever trainable.
        zero: the ZeRO reduction with its sharded buckets, if any.
        hooks: the program's hooks on the gradients.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer | None,
        runtime: Runtime,
        *,
        zero_stage: int,
        bucket_bytes: int,
    ):
        tp, dp, weights, syncs = runtime.mesh.tp, runtime.mesh.tokens, runtime.weights, runtime.gradients.syncs
        self.tp, self.dp, self.optimizer, self.weights = tp, dp, optimizer, weights
        self.bucket_bytes, self._meet_over = bucket_bytes, runtime.meet_over
        name = None if runtime.plan is None else runtime.plan.reduce_dtype
        self._sent: torch.dtype | None = None if name is None else getattr(torch, name)
        # Without an optimizer there are no steps, and the host has nothing.
        self._on_host = optimizer is not None and runtime.plan is not None and runtime.plan.offload is not None
        stage = 3 if weights is not None else zero_stage if dp.size > 1 else min(zero_stage, 1)
        self.stage = 0 if stage == 1 and optimizer is None else stage
        self.parameters: list[nn.Parameter] = []
        self.syncs = syncs
        self.hooks = GradientHooks(runtime.mesh, parameters)
        self.zero: ReduceScatter | None = None
        self._watch = _Watch(parameters)
        self._known: set[int] = set()
        self._mesh = runtime.mesh
        self._sync_of: dict[tuple[str, bool], GradientSync] = {}  # by the name of the axis, and whether ZeRO shards
        if self.stage > 0:
            self.zero = ReduceScatter(can_wait=self.stage == 1, sent=self._sent)
            if optimizer is not None:
                bind_optimizer(optimizer, self.zero)
            self._sync(dp, is_sharded=True)
        self._take_in(self._new())
        if not self.syncs:  # another stage of the pipeline may have gradients with hooks
            self._sync(dp, is_sharded=False)

    def follow(self) -> None:
        """Add the parameters that were thawed since the last call.

        Every rank must make the call, and must have thawed the same parameters (see ReplicaComparison).
        """
        if self._watch.accept():
            with reading_shards():
                self._take_in(self._new())

    def check(self) -> None:
        """Raise if parameters that were thawed after the model's last forward pass have gradients.

        Raises:
            ValueError: if there are such parameters. The message lists them.
        """
        late = [p for p in self._new() if p.grad is not None] if self._watch.is_changed else []
        if late:
            raise ValueError(
                f"{_shown([layout_of(p).name for p in late])} had requires_grad set after the model's last forward "
                "pass, and now has a gradient that is this rank's own. Set requires_grad before the forward pass, "
                "and call the model that to_distributed returned, not a part of it: "
                "loss = model(**batch).loss (with shard_optimizer: set requires_grad before shard_optimizer)"
            )

    def _new(self) -> list[nn.Parameter]:
        # Backward finishes parameters roughly in the reverse of their order.
        return [
            p
            for p in reversed(self._watch.parameters)
            if p.requires_grad and id(p) not in self._known and layout_of(p).is_held
        ]

    def _take_in(self, new: list[nn.Parameter]) -> None:
        self.parameters += new
        for parameter in self._watch.parameters:
            if parameter.requires_grad and not layout_of(parameter).is_held and not self.hooks.manages(parameter):
                self.hooks.manage(parameter, None, arrive=_nothing, accumulated=_nothing)
        sharded = self._shard(new)
        if self.zero is not None:
            self.zero.extend(sharded)
            if self.optimizer is not None:
                step_slices(self.optimizer, self.zero, sharded)
        for axis in self._axes:
            if buckets := [one.bucket for one in sharded if one.axis is axis]:
                self._sync(axis, is_sharded=True).extend(buckets)
        done = {id(p) for one in sharded for p in one.bucket.parameters}
        self._known |= done.union(map(id, new))
        for axis in self._axes:
            if whole := [p for p in new if id(p) not in done and self._axis_of(p) is axis]:
                # On one rank, only partial gradients need a reduction.
                reduced = [p for p in whole if axis.size > 1 or axis is not self.dp or layout_of(p).has_addends]
                ids = set(map(id, reduced))
                buckets = make_buckets(reduced, max_bytes=self.bucket_bytes, accumulate_in_float32=False)
                self._sync(axis, is_sharded=False).extend(buckets, [p for p in whole if id(p) not in ids])

    @property
    def _axes(self) -> tuple[Axis, Axis]:
        return self.dp, self._mesh.copies

    def _axis_of(self, parameter: nn.Parameter) -> Axis:
        return stepped_over(layout_of(parameter), self._mesh)

    def _shard(self, new: list[nn.Parameter]) -> list[ShardedBucket]:
        """Return buckets of the ``new`` parameters that ZeRO shards."""
        if self.weights is not None:
            return self.weights.train(new, on_host=self._on_host)
        if self.zero is None:
            return []
        ids = {id(p) for p in new}
        groups = [[p for p in reversed(group) if id(p) in ids] for group in self.zero.groups]
        if self.stage > 1:  # the gradients of parameters that the optimizer does not step are sharded too
            stepped = {id(p) for group in groups for p in group}
            groups.append([p for p in new if id(p) not in stepped])
        return [
            one
            for group in groups
            for axis in self._axes
            for one in lay_out(
                [p for p in group if self._axis_of(p) is axis],
                EqualSlices(axis),
                self.bucket_bytes,
                on_host=self._on_host,
            )
        ]

    def _sync(self, axis: Axis, *, is_sharded: bool) -> GradientSync:
        """Return what averages the gradients of parameters over an axis.

        The loss is multiplied by the number of ranks over which other gradients are averaged. Those of the experts are
        averaged over another number of ranks, which have the tokens of all ranks together. So these are scaled.
        """
        key = axis.name, is_sharded
        if key not in self._sync_of:
            reduction = self.zero if is_sharded else AllReduce(axis, self._sent)
            assert reduction is not None
            self._sync_of[key] = GradientSync(
                [],
                tp=self.tp,
                reduction=reduction,
                hooks=self.hooks,
                meet=functools.partial(self._meet_over, axis),
                # A bucket of stage 3 is a whole layer, so one in flight is enough to hide the communication.
                in_flight=1 if is_sharded and self.weights is not None else IN_FLIGHT,
                scale=axis.size / self.dp.size,
                peers=self.syncs,
            )
            self.syncs.append(self._sync_of[key])
        return self._sync_of[key]


class FixedParameters:
    """The parameters that an engine trains. They are fixed when this object is made.

    Args:
        parameters: the parameters of the model, which have layouts.
        engine: the engine's name.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], engine: str):
        self._watch, self._engine = _Watch(parameters), engine
        self._known = {id(p) for p in self._watch.parameters if p.requires_grad}

    def follow(self) -> None:
        """Raise like :meth:`check`, since an engine accepts no further parameters."""
        self.check()
        self._watch.accept()

    def check(self) -> None:
        """Raise if parameters were thawed.

        Raises:
            ValueError: if there are such parameters. The message lists them.
        """
        if not self._watch.is_changed:
            return
        if late := [p for p in self._watch.parameters if p.requires_grad and id(p) not in self._known]:
            raise ValueError(
                f"{_shown([layout_of(p).name for p in late])} was frozen when {self._engine} took the parameters, so "
                f"{self._engine} would not step it; set requires_grad before distributing the model, or train without "
                "the engine: to_distributed(model, optimizer, loader) follows requires_grad"
            )


class _Watch:
    """The ``requires_grad`` flags of all parameters of a model, as they were last accepted."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = parameters
        self._flags = self._read()

    def _read(self) -> list[bool]:
        with reading_shards():  # reading a guarded parameter's property takes microseconds, and this runs in every step
            return [p.requires_grad for p in self.parameters]

    @property
    def is_changed(self) -> bool:
        return self._read() != self._flags

    def accept(self) -> bool:
        """Accept the present flags, and return whether they had changed."""
        before, self._flags = self._flags, self._read()
        return before != self._flags


def _nothing(_: Tensor) -> None:
    """The runtime's hook on a gradient that only another stage of the pipeline has."""


def _shown(names: list[str]) -> str:
    return ", ".join(islice(names, 3)) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
