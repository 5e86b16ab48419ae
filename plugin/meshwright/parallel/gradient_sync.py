"""Synchronise gradients while backward runs: over the data-parallel axis, and between copies over TP.

Every reduction is an average. The loss carries a factor dp (see GlobalMean) and the gradient of a
row with n copies arrives times n, so an average gives the sum that is wanted, and averaging what is
already equal changes nothing: a backward pass may synchronise into a gradient that an earlier one
synchronised. (transformers sums q/k-norm gradients in place at every pass: with two accumulation
steps and tp=2 they come out 1.5 times too large.)
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.errors import UnreadableTensorError
from meshwright.parallel.collectives import Axis, start_all_reduce
from meshwright.parallel.gradient_buckets import Bucket
from meshwright.parallel.row_layout import record_of
from meshwright.parallel.shard_reads import reading_shards
from meshwright.parallel.sharded_parameter import LocalGradient

IN_FLIGHT = 4  # buckets that are reduced at a time


class Reduction(Protocol):
    """What happens to a bucket's gradients over the data-parallel axis."""

    @property
    def can_wait(self) -> bool:
        """Whether a pass under ``no_sync`` leaves its gradients whole; otherwise it reduces them like any other."""

    def prepare(self, parameter: nn.Parameter) -> None:
        """Called before backward adds to ``parameter.grad``."""

    def aside(self, gradients: dict[int, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside reduce into ``gradients`` instead; only asked of those that cannot wait."""

    def add(self, gradients: dict[int, Tensor], factor: Tensor) -> None:
        """Add what :meth:`aside` collected, times a number."""

    def hold(self, bucket: Bucket) -> None:
        """Called for a complete bucket of a pass that does not synchronise."""

    def holds(self, bucket: Bucket) -> bool:
        """Whether the bucket has gradients from such passes that were neither synchronised nor cleared since."""

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
        in_flight: buckets that are reduced at a time.
        peers: all that synchronise parameters of the same model, in order. The first overlaps with backward; the
            others follow at its end, since ranks need not get their gradients in the same order.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        *,
        tp: Axis,
        reduction: Reduction,
        unreduced: Iterable[nn.Parameter] = (),
        meet: Callable[[], None] = lambda: None,
        in_flight: int = IN_FLIGHT,
        peers: list[GradientSync] | None = None,
    ):
        self.buckets: list[Bucket] = []
        self.tp, self.reduction, self._meet = tp, reduction, meet
        self._in_flight = in_flight
        self._peers = [self] if peers is None else peers
        self._enabled = True
        self._paused = False
        self._checked_task = -1
        self._end_of_pass: Callable[[], object] = _no_pass
        self._task = -1
        self._is_nested = False
        self._has_gradients = False
        self._missing: list[set[int]] = []
        self._unused: set[int] | None = None
        self._next = 0
        self._finish: list[Callable[[], None]] = []
        self._bucket_of: dict[int, int] = {}
        self._copies: dict[int, Tensor | float] = {}
        self.extend(buckets, unreduced)

    def extend(self, buckets: Iterable[Bucket], unreduced: Iterable[nn.Parameter] = ()) -> None:
        """Synchronise more parameters, between two backward passes; see the arguments of the class."""
        for bucket in buckets:
            self._bucket_of |= {id(p): len(self.buckets) for p in bucket.parameters}
            self._copies |= {id(p): record_of(p).copies(p) for p in bucket.parameters if record_of(p).is_grad_partial}
            self.buckets.append(bucket)
            for parameter in bucket.parameters:
                _add_hooks(parameter, self)
        for parameter in unreduced:
            parameter.register_post_accumulate_grad_hook(_guard)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copied or pickled model takes none of this along: its parameters have no hooks.
        return type(None), ()

    @property
    def has_unsynced(self) -> bool:
        """Whether some gradients are this rank's own, from passes under ``no_sync``."""
        return any(self.reduction.holds(bucket) for bucket in self.buckets)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the first one outside synchronises their sum."""
        before, self._enabled = self._enabled, not self.reduction.can_wait
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

    def arrive(self, parameter: nn.Parameter, grad: Tensor) -> Tensor | None:
        """Called with a gradient that is about to be added to ``parameter.grad``."""
        if self._paused:
            return None
        self._check_pass(parameter)
        self.reduction.prepare(parameter)
        copies = self._copies.get(id(parameter))
        return None if copies is None else grad * copies

    def _check_pass(self, parameter: nn.Parameter) -> None:
        """Refuse ``torch.autograd.grad``, whose gradients no reduction would take; once for each pass."""
        task = torch._C._current_graph_task_id()
        if task == self._checked_task:
            return
        self._checked_task = task
        try:
            with reading_shards():
                node = torch.autograd.graph.get_gradient_edge(parameter).node
            torch._C._will_engine_execute_node(node)
        except RuntimeError as error:  # torch's answer about a leaf whose gradient is handed out, not accumulated
            raise UnreadableTensorError(
                f"torch.autograd.grad would give this rank's own gradient of {record_of(parameter).name}: no reduction "
                "takes what does not arrive in parameter.grad, so it differs between the ranks. Instead call "
                "loss.backward(), and on all ranks meshwright.full_gradients(model)"
            ) from error

    def expect_none(self, parameters: Iterable[nn.Parameter]) -> None:
        """Do not wait in the next pass for these parameters; of several calls before it, those named by all."""
        unused = {id(p) for p in parameters}
        self._unused = unused if self._unused is None else self._unused & unused

    def begin(self) -> None:
        """Make the running backward pass the one at whose end gradients are synchronised.

        Passes nested in it (reentrant checkpointing) belong to it. Without this call it is the pass in
        which the first gradient arrives.
        """
        for sync in self._peers:
            sync._begin()

    def _begin(self) -> None:
        if self._end_of_pass() is not None:
            return
        end = functools.partial(self._finalize)
        # The engine alone keeps it: a pass that raised never calls it, but takes it along.
        self._end_of_pass = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._task = torch._C._current_graph_task_id()
        self._is_nested = False
        self._has_gradients = False
        unused = self._unused or set()
        self._missing = [{id(p) for p in bucket.parameters if p.requires_grad} - unused for bucket in self.buckets]
        self._next = 0
        self._finish = []

    def accumulated(self, parameter: nn.Parameter) -> None:
        """Called when a gradient was added to ``parameter.grad``."""
        self.begin()
        index = self._bucket_of[id(parameter)]
        if index < self._next:
            raise ValueError(
                f"a gradient of {record_of(parameter).name} arrived after its bucket was reduced. Either the loss uses "
                "it although no output of the forward pass depends on it: use find_unused_parameters=False. Or it is "
                "used inside and outside of a reentrant checkpoint: use torch.utils.checkpoint with use_reentrant=False"
            )
        self._has_gradients = True
        self._missing[index].discard(id(parameter))
        # A gradient from a nested pass may arrive again from the next one: then only the end is safe.
        self._is_nested |= torch._C._current_graph_task_id() != self._task
        if self._enabled and not self._is_nested and self is self._peers[0]:
            self._start_complete()

    def _start_complete(self) -> None:
        # In order, so that every rank starts the same collectives in the same order.
        while self._next < len(self.buckets) and not self._missing[self._next]:
            self._start(self.buckets[self._next])
            self._next += 1

    def _is_idle(self, bucket: Bucket) -> bool:
        """Whether all of a bucket is frozen, with nothing left to synchronise."""
        return not any(p.requires_grad for p in bucket.parameters) and not self.reduction.holds(bucket)

    def _start(self, bucket: Bucket) -> None:
        if self._is_idle(bucket):
            return
        flat = self.reduction.take(bucket)
        if bucket.is_grad_partial:
            bucket.average_copies(flat, self.tp)
        self._finish.append(self.reduction.start(bucket, flat))
        # A reduction keeps its buffers until it is finished: those of a large model must not all live at once.
        if len(self._finish) > self._in_flight:
            self._finish.pop(0)()

    def _finalize(self) -> None:
        self._end_of_pass = _no_pass
        # Another rank may have gradients here where this one has some elsewhere only.
        if not any(sync._has_gradients for sync in self._peers):  # torch.autograd.grad
            return
        self._unused = None
        if not self._enabled:
            for bucket in self.buckets:
                self.reduction.hold(bucket)
            return
        for bucket in self.buckets[self._next :]:
            self._start(bucket)
        self._meet()
        finish, self._finish = self._finish, []
        for wait in finish:
            wait()


def _add_hooks(parameter: nn.Parameter, sync: GradientSync) -> None:
    # Weakly: through autograd's hooks a parameter would keep alive itself, the process groups and their threads.
    own, synchroniser = weakref.ref(parameter), weakref.ref(sync)

    def arrive(grad: Tensor) -> Tensor | None:
        target, of = own(), synchroniser()
        return None if target is None or of is None else of.arrive(target, grad)

    def accumulated(target: Tensor) -> None:
        if (of := synchroniser()) is not None:
            of.accumulated(target)  # type: ignore[arg-type]

    parameter.register_hook(arrive)
    parameter.register_post_accumulate_grad_hook(accumulated)


class AllReduce:
    """Without ZeRO: every data-parallel rank ends with the whole averaged gradient in ``.grad``."""

    can_wait = True

    def __init__(self, dp: Axis):
        self.dp = dp

    def prepare(self, parameter: nn.Parameter) -> None:
        """Nothing to prepare: gradients accumulate in ``.grad`` as on one device."""

    def aside(self, gradients: dict[int, Tensor]) -> contextlib.AbstractContextManager[None]:
        raise AssertionError("whole gradients wait in autograd")

    def add(self, gradients: dict[int, Tensor], factor: Tensor) -> None:
        raise AssertionError("whole gradients wait in autograd")

    def hold(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            _guard(parameter)
            if parameter.grad is not None:
                setattr(parameter.grad, _OWN, True)

    def holds(self, bucket: Bucket) -> bool:
        return any(getattr(parameter.grad, _OWN, False) for parameter in bucket.parameters)

    def take(self, bucket: Bucket) -> Tensor:
        flat = bucket.flatten_gradients(1 / self.dp.size, extra=len(bucket.parameters))
        # One element a parameter says whether this rank has a gradient: zeros alone cannot tell.
        has_one = flat[bucket.numel :].fill_(1)
        for index, parameter in enumerate(bucket.parameters):
            if parameter.grad is None:
                has_one[index] = 0
        return flat

    def start(self, bucket: Bucket, flat: Tensor) -> Callable[[], None]:
        wait = start_all_reduce(flat, self.dp)

        def finish() -> None:
            reduced = wait()
            ranks_with_one = reduced[bucket.numel :]
            for index, (parameter, segment) in enumerate(bucket.segments(reduced)):
                # No rank had a gradient: leave None, so that the optimizer skips it as on one device.
                if parameter.grad is None and not ranks_with_one[index]:
                    continue
                parameter.grad = segment
                _guard(parameter)

        return finish


# Marks a gradient that no_sync() left unsynchronised; a reduced gradient is another tensor.
_OWN = "meshwright_own"


def _no_pass() -> None:
    return None


def _guard(parameter: nn.Parameter) -> None:
    record = getattr(parameter, "meshwright", None)
    if parameter.grad is not None and record is not None and record.is_sharded:
        parameter.grad = LocalGradient.of(parameter.grad, record)
