"""Synchronise gradients while backward runs: over the data-parallel axis, and between copies over TP.

Every reduction is an average. The loss carries a factor dp (see GlobalMean), and the gradient of a
row with n copies is multiplied by n on arrival, so an average gives the required sum. Averaging equal
values changes nothing, so a later backward pass may add to a synchronised gradient and synchronise it
again. (transformers sums q/k-norm gradients in place in every pass. With two
accumulation steps and tp=2, these gradients are 1.5 times too large.)
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.autograd import refuse_second_order
from meshwright.errors import UnreadableTensorError
from meshwright.layout.tensor_layout import TensorLayout, layout_of
from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import start_all_reduce
from meshwright.parallel.gradients.buckets import Bucket, has_part
from meshwright.parallel.gradients.gradient_hooks import GradientHooks, ReducedGradients
from meshwright.parallel.shards.sharded_parameter import LocalGradient
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.plan.parts import IN_FLIGHT
from meshwright.temporarily import temporarily


class Reduction(ReducedGradients, Protocol):
    """The interface of a reduction of a bucket's gradients over the data-parallel axis."""

    @property
    def can_wait(self) -> bool:
        """Whether passes under ``no_sync`` leave gradients unreduced; otherwise every pass reduces its gradients."""

    def prepare(self, parameter: nn.Parameter) -> None:
        """Called before backward adds to ``parameter.grad``."""

    def aside(self, gradients: dict[int, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Make backward passes in the context reduce into ``gradients``; called only if ``can_wait`` is False."""

    def add(self, gradients: dict[int, Tensor], factor: Tensor) -> None:
        """Add the gradients that :meth:`aside` collected, times ``factor``."""

    def hold(self, bucket: Bucket) -> None:
        """Called for each bucket at the end of a pass that does not synchronise."""

    def holds(self, bucket: Bucket) -> bool:
        """Return whether the bucket has gradients from :meth:`hold` that were neither synchronised nor cleared."""

    def take(self, bucket: Bucket) -> Tensor:
        """Return the flat, unreduced gradients of a complete bucket."""

    def start(self, bucket: Bucket, flat: Tensor) -> Callable[[], None]:
        """Start the reduction; the returned function waits for it and stores the result."""


class GradientSync:
    """Hooks on parameters that reduce gradients in buckets, overlapped with backward.

    Args:
        buckets: the buckets, in the order in which backward completes them; buckets with partial gradients come last.
        tp: the axis over which copies are averaged.
        reduction: the reduction over the data-parallel axis.
        hooks: the program's hooks on the model's gradients.
        meet: a function that compares the ranks, called once per synchronised pass, before the gradients are used.
        in_flight: the number of buckets that are reduced at the same time.
        scale: the factor of each gradient on arrival, where the ranks of the reduction have the tokens of others too.
        peers: all ``GradientSync`` objects of the same model, in order. The first overlaps with backward. The others
            run at the end of backward, since the order of their gradients may differ between ranks.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        *,
        tp: Axis,
        reduction: Reduction,
        hooks: GradientHooks,
        meet: Callable[[], None] = lambda: None,
        in_flight: int = IN_FLIGHT,
        scale: float = 1.0,
        peers: list[GradientSync] | None = None,
    ):
        self.buckets: list[Bucket] = []
        self.tp, self.reduction, self.hooks, self._meet = tp, reduction, hooks, meet
        self._in_flight, self._scale = in_flight, scale
        self._peers = [self] if peers is None else peers
        self._enabled = True
        self._paused = False
        self._checked_task = -1
        self._end_of_pass: weakref.ref[Callable[[], None]] | None = None  # None between passes
        self._task = -1
        self._is_nested = False
        self._has_gradients = False
        self._missing: list[set[int]] = []
        self._unused: set[int] | None = None
        self._next = 0
        self._finish: list[Callable[[], None]] = []
        self._bucket_of: dict[int, int] = {}
        self._copies: dict[int, Tensor | float] = {}
        self.extend(buckets)

    def extend(self, buckets: Iterable[Bucket], unreduced: Iterable[nn.Parameter] = ()) -> None:
        """Add parameters whose gradients are synchronised; call this only between two backward passes.

        Args:
            buckets: as for the class.
            unreduced: sharded parameters in no bucket, whose gradients need no reduction.
        """
        for bucket in buckets:
            self._bucket_of |= {id(p): len(self.buckets) for p in bucket.parameters}
            self._copies |= {id(p): layout_of(p).copies(p) for p in bucket.parameters if layout_of(p).has_addends}
            self.buckets.append(bucket)
            for parameter in bucket.parameters:
                _add_hooks(parameter, self)
        for parameter in unreduced:
            _add_hooks(parameter, self, is_reduced=False)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        # A copied or pickled model has None in place of this object, since its parameters have no hooks.
        return type(None), ()

    @property
    def has_unsynced(self) -> bool:
        """Whether passes under ``no_sync`` left gradients that are not synchronised yet."""
        return any(self.reduction.holds(bucket) for bucket in self.buckets)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Make backward passes only accumulate, if the reduction can wait; the next pass synchronises their sum.

        If the program has hooks on gradients, each pass synchronises, since the hooks see the gradients of each pass.
        """
        return temporarily(self, _enabled=not self.reduction.can_wait)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Neither scale nor reduce gradients that are computed in this context."""
        return temporarily(self, _paused=True)

    def arrive(self, parameter: nn.Parameter, grad: Tensor | None) -> Tensor | None:
        """Called before ``grad`` goes to ``parameter.grad``; multiplies ``grad`` by its number of copies if it is
        partial, otherwise by the scale.

        ``grad`` is None for the weight of a projection that its block did not use (see column_projections.py).
        """
        if self._paused or self.hooks.is_running:
            return None
        self._check_pass(parameter)
        if self.hooks.hooked:
            self.begin()
        self.reduction.prepare(parameter)
        factor = self._copies.get(id(parameter), None if self._scale == 1.0 else self._scale)
        return None if factor is None or grad is None else grad * factor

    def _check_pass(self, parameter: nn.Parameter) -> None:
        """Raise if ``torch.autograd.grad`` runs, or a pass makes a graph: a reduction has none. Check once per pass."""
        task = torch._C._current_graph_task_id()
        if task == self._checked_task:
            return
        self._checked_task = task
        if self.hooks.losses is not None:
            self.hooks.losses.look_at_pass()
        refuse_second_order("Write loss.backward(), or use a plan of one process")
        try:
            with reading_shards():
                node = torch.autograd.graph.get_gradient_edge(parameter).node
            torch._C._will_engine_execute_node(node)
        except RuntimeError as error:  # torch raises for a leaf whose gradient is returned, not accumulated
            raise UnreadableTensorError(
                f"torch.autograd.grad would return this rank's own gradient of {layout_of(parameter).name}, which "
                "differs between the ranks: only gradients in parameter.grad are reduced. Instead, on all ranks, call "
                "loss.backward() and then meshwright.full_gradients(model)"
            ) from error

    def expect_none(self, parameters: Iterable[nn.Parameter]) -> None:
        """Expect no gradients of these parameters in the next pass; of several calls, the intersection counts."""
        unused = {id(p) for p in parameters}
        self._unused = unused if self._unused is None else self._unused & unused

    def begin(self) -> None:
        """Synchronise gradients at the end of the backward pass that is running.

        Nested passes (reentrant checkpointing) count as parts of this pass. Without this call, gradients are
        synchronised at the end of the pass in which the first gradient arrives.
        """
        for sync in self._peers:
            sync._begin()
        if self.hooks.hooked:
            self.hooks.begin()

    def _begin(self) -> None:
        if self._end_of_pass is not None and self._end_of_pass() is not None:
            return
        end = functools.partial(self._finalize)
        # Only autograd's engine keeps `end` alive, so a pass that raises drops it without calling it.
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
        """Called after a gradient was added to ``parameter.grad``."""
        if self.hooks.is_running:
            return
        self.begin()
        if self.hooks.hooked and self.hooks.are_any:
            self.hooks.accumulated(parameter)
        index = self._bucket_of.get(id(parameter))
        if index is None:  # there is nothing to reduce
            return
        if index < self._next:
            raise ValueError(
                f"a gradient of {layout_of(parameter).name} arrived after its bucket was reduced. If the loss uses "
                "the parameter although no output of the forward pass depends on it, set find_unused_parameters=False. "
                "If the parameter is used both inside and outside of a reentrant checkpoint, call "
                "torch.utils.checkpoint with use_reentrant=False"
            )
        self._has_gradients = True
        self._missing[index].discard(id(parameter))
        # Another nested pass may add to this gradient again, so buckets are reduced only at the end.
        self._is_nested |= torch._C._current_graph_task_id() != self._task
        is_synced = self._enabled or self.hooks.are_any
        if is_synced and not self._is_nested and self is self._peers[0]:
            self._start_complete()

    def _start_complete(self) -> None:
        # In order, so that every rank starts the same collectives in the same order.
        while self._next < len(self.buckets) and not self._missing[self._next]:
            bucket = self.buckets[self._next]
            if bucket.is_apart:
                return
            self._start(bucket)
            self._next += 1

    def _is_idle(self, bucket: Bucket) -> bool:
        """Return whether a bucket's parameters are all frozen and have no gradients left to synchronise."""
        return not any(p.requires_grad for p in bucket.parameters) and not self.reduction.holds(bucket)

    def _start(self, bucket: Bucket) -> None:
        if self._is_idle(bucket):
            return
        flat = self.reduction.take(bucket)
        if bucket.has_addends:
            bucket.average_copies(flat, self.tp)
        self._finish.append(self.reduction.start(bucket, flat))
        # A reduction keeps its buffers until it finishes. A large model's buffers must not all be alive at once.
        if len(self._finish) > self._in_flight:
            self._finish.pop(0)()

    def _finalize(self) -> None:
        self._end_of_pass = None
        # Peers count too: other ranks may have gradients here while this rank has gradients only in a peer.
        if not any(sync._has_gradients for sync in self._peers):  # the pass was torch.autograd.grad
            return
        self._unused = None
        with reading_shards():
            if not (self._enabled or self.hooks.are_any):
                for bucket in self.buckets:
                    self.reduction.hold(bucket)
                return
            for bucket in self.buckets[self._next :]:
                self._start(bucket)
        self._meet()
        finish, self._finish = self._finish, []
        with reading_shards():
            for wait in finish:
                wait()


def _add_hooks(parameter: nn.Parameter, sync: GradientSync, *, is_reduced: bool = True) -> None:
    # Weak references, since autograd's hooks would keep the parameter, process groups and their threads alive.
    own, synchroniser = weakref.ref(parameter), weakref.ref(sync)
    is_part = not is_reduced and has_part(parameter)

    # A guarded parameter would pass each read of its .grad through Python.
    def arrive(grad: Tensor | None) -> Tensor | None:
        target, of = own(), synchroniser()
        if target is None or of is None:
            return None
        with reading_shards():
            return of.arrive(target, grad)

    def accumulated(target: Tensor) -> None:
        with reading_shards():
            if is_part:
                _mark(target)
            if (of := synchroniser()) is not None and (is_reduced or of.hooks.are_any):
                of.accumulated(target)  # type: ignore[arg-type]

    sync.hooks.manage(
        parameter,
        sync.reduction,
        arrive=arrive,
        accumulated=accumulated,
        needs_arrival=is_reduced,
        needs_gradient=is_reduced or is_part,
    )


class AllReduce:
    """The reduction without ZeRO: every data-parallel rank ends with the whole averaged gradient in ``.grad``.

    Args:
        dp: the data-parallel axis.
        sent: the dtype in which gradients travel; None for their own.
    """

    can_wait = True

    def __init__(self, dp: Axis, sent: torch.dtype | None = None):
        self.dp, self.sent = dp, sent
        # The gradients that no_sync() left unsynchronised; a reduction replaces the tensors.
        self._unreduced = WeakTensorKeyDictionary()

    def prepare(self, parameter: nn.Parameter) -> None:
        """Do nothing: gradients accumulate in ``.grad`` as on one device."""

    def aside(self, gradients: dict[int, Tensor]) -> contextlib.AbstractContextManager[None]:
        raise AssertionError("aside() is for reductions that cannot wait; AllReduce leaves whole gradients to autograd")

    def add(self, gradients: dict[int, Tensor], factor: Tensor) -> None:
        raise AssertionError("add() is for reductions that cannot wait; AllReduce leaves whole gradients to autograd")

    def settle(self) -> None:
        """Do nothing: a gradient that the program set is in ``.grad``."""

    def part(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = parameter.grad
        return None if gradient is None else gradient.as_subclass(Tensor).reshape(-1)

    def put(self, parameter: nn.Parameter, part: Tensor | None) -> None:
        parameter.grad = None if part is None else part.view(parameter.shape)
        if has_part(parameter):
            _mark(parameter)

    def layout(self, parameter: nn.Parameter) -> TensorLayout:
        return layout_of(parameter)

    def is_unsynced(self, parameter: nn.Parameter) -> bool:
        return parameter.grad is not None and parameter.grad in self._unreduced

    def hold(self, bucket: Bucket) -> None:
        for parameter, is_part in zip(bucket.parameters, bucket.are_parts, strict=True):
            if is_part:
                _mark(parameter)
            if parameter.grad is not None:
                self._unreduced[parameter.grad] = True

    def holds(self, bucket: Bucket) -> bool:
        return any(map(self.is_unsynced, bucket.parameters))

    def take(self, bucket: Bucket) -> Tensor:
        flat = bucket.flatten_gradients(1 / self.dp.size, extra=len(bucket.parameters))
        # One element per parameter records whether this rank has a gradient, since a gradient may be all zeros.
        has_one = flat[bucket.numel :].fill_(1)
        for index, parameter in enumerate(bucket.parameters):
            gradient = parameter.grad
            if gradient is None:
                has_one[index].zero_()  # an assignment would copy the number from the host
            elif gradient.dtype != bucket.dtype:
                raise ValueError(
                    f"{layout_of(parameter).name} is now {gradient.dtype}, but was {bucket.dtype} when the model was "
                    "distributed, and its gradients are reduced in that dtype. Call model.to(...), .bfloat16(), "
                    ".float() or the like before to_distributed"
                )
        return flat

    def start(self, bucket: Bucket, flat: Tensor) -> Callable[[], None]:
        dtype = flat.dtype
        wait = start_all_reduce(flat.to(self.sent if self.sent and not dtype.is_complex else dtype), self.dp)

        def finish() -> None:
            reduced = wait().to(dtype)
            # One read, only if this rank lacks a gradient that another may have: reading makes the host wait for CUDA.
            lacks_one = self.dp.size > 1 and any(p.grad is None for p in bucket.parameters)
            ranks_with_one = reduced[bucket.numel :].tolist() if lacks_one else [0.0] * len(bucket.parameters)
            for index, (parameter, segment) in enumerate(bucket.segments(reduced)):
                # No rank had a gradient: keep None, so the optimizer skips the parameter as on one device.
                if parameter.grad is None and not ranks_with_one[index]:
                    continue
                parameter.grad = segment
                if bucket.are_parts[index]:
                    _mark(parameter)

        return finish


def _mark(parameter: Tensor) -> None:
    with reading_shards():
        if (gradient := parameter.grad) is not None:
            parameter.grad = LocalGradient.of(gradient, layout_of(parameter))
