"""Synchronise gradients while backward runs: over the data-parallel axis, and between copies over TP.

Every reduction is an average. The loss carries a factor dp (see CausalLMLoss) and the gradient of a
row with n copies arrives times n, so an average gives the sum that is wanted, and averaging what is
already equal changes nothing: a backward pass may synchronise into a gradient that an earlier one
synchronised. (transformers sums q/k-norm gradients in place at every pass: with two accumulation
steps and tp=2 they come out 1.5 times too large.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.parallel.buckets import Bucket
from meshwright.parallel.collectives import Axis, start_all_reduce
from meshwright.parallel.guarded import LocalGradient
from meshwright.parallel.layout import record_of


class Reduction(Protocol):
    """What happens to a bucket's gradients over the data-parallel axis."""

    def prepare(self, parameter: nn.Parameter) -> None:
        """Called before backward adds to ``parameter.grad``."""

    def hold(self, bucket: Bucket) -> None:
        """Called for a complete bucket of a pass that does not synchronise."""

    def take(self, bucket: Bucket) -> Tensor:
        """Give the flat gradients of a complete bucket, not yet reduced."""

    def start(self, bucket: Bucket, flat: Tensor) -> Callable[[], None]:
        """Begin to reduce; the returned call waits and puts the result in its place."""


class GradientSync:
    """Hooks on parameters that reduce gradients in buckets, overlapped with backward.

    Args:
        buckets: in the order in which backward completes them; partial ones last.
        tp: axis over which copies are averaged.
        reduction: what to do over the data-parallel axis.
        unreduced: sharded parameters in no bucket, whose gradients are whole as they come.
        meet: called once a synchronised pass, before the gradients are used: compares the ranks.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        *,
        tp: Axis,
        reduction: Reduction,
        unreduced: Iterable[nn.Parameter] = (),
        meet: Callable[[], None] = lambda: None,
    ):
        self.buckets, self.tp, self.reduction, self._meet = buckets, tp, reduction, meet
        self.has_unsynced = False
        self._enabled = True
        self._paused = False
        self._pass = -1
        self._missing: list[int] = []
        self._next = 0
        self._finish: list[Callable[[], None]] = []
        self._bucket_of = {id(p): i for i, bucket in enumerate(buckets) for p in bucket.parameters}
        for parameter in unreduced:
            parameter.register_post_accumulate_grad_hook(_guard)
        for bucket in buckets:
            for parameter in bucket.parameters:
                parameter.register_hook(self._arrive(parameter))
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the first one outside synchronises their sum."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients computed inside are nobody's yet: no scaling, no reduction."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _arrive(self, parameter: nn.Parameter) -> Callable[[Tensor], Tensor | None]:
        copies = record_of(parameter).copies(parameter) if record_of(parameter).is_grad_partial else None

        def arrive(grad: Tensor) -> Tensor | None:
            if self._paused:
                return None
            self.reduction.prepare(parameter)
            return None if copies is None else grad * copies

        return arrive

    def _accumulated(self, parameter: nn.Parameter) -> None:
        # A pass that raised never reached its callback: the graph task tells that this is another.
        if self._pass != torch._C._current_graph_task_id():
            self._pass = torch._C._current_graph_task_id()
            self._missing = [len(bucket.parameters) for bucket in self.buckets]
            self._next = 0
            self._finish = []
            torch.autograd.Variable._execution_engine.queue_callback(self._finalize)
        self._missing[self._bucket_of[id(parameter)]] -= 1
        if not self._enabled:
            return
        # In order, so that every rank starts the same collectives in the same order.
        while self._next < len(self.buckets) and not self._missing[self._next]:
            if self.buckets[self._next].is_grad_partial:
                break
            self._start(self.buckets[self._next])
            self._next += 1

    def _start(self, bucket: Bucket) -> None:
        flat = self.reduction.take(bucket)
        if bucket.is_grad_partial:
            bucket.average_copies(flat, self.tp)
        self._finish.append(self.reduction.start(bucket, flat))

    def _finalize(self) -> None:
        self._pass = -1
        if not self._enabled:
            for bucket in self.buckets:
                self.reduction.hold(bucket)
            self.has_unsynced = True
            return
        for bucket in self.buckets[self._next :]:
            self._start(bucket)
        self._meet()
        finish, self._finish = self._finish, []
        for wait in finish:
            wait()
        self.has_unsynced = False


class AllReduce:
    """Without ZeRO: every data-parallel rank ends with the whole averaged gradient in ``.grad``."""

    def __init__(self, dp: Axis):
        self.dp = dp

    def prepare(self, parameter: nn.Parameter) -> None:
        """Nothing to prepare: gradients accumulate in ``.grad`` as on one device."""

    def hold(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            _guard(parameter)

    def take(self, bucket: Bucket) -> Tensor:
        return bucket.flatten_gradients(1 / self.dp.size)

    def start(self, bucket: Bucket, flat: Tensor) -> Callable[[], None]:
        wait = start_all_reduce(flat, self.dp)

        def finish() -> None:
            for parameter, segment in bucket.segments(wait()):
                # No rank had a gradient: leave None, so that the optimizer skips it as on one device.
                if parameter.grad is None and not segment.any():
                    continue
                parameter.grad = segment
                _guard(parameter)

        return finish


def _guard(parameter: nn.Parameter) -> None:
    if parameter.grad is not None and record_of(parameter).is_sharded:
        parameter.grad = parameter.grad.as_subclass(LocalGradient)
