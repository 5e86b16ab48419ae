"""Runs the program's hooks on gradients where these are whole: at the end of a backward pass, after the reduction.

On one device ``register_hook`` sees the whole gradient of a pass, and ``register_post_accumulate_grad_hook`` the whole
sum in ``parameter.grad``. While backward runs, a rank has neither: its gradient is of its own rows, of its own part of
the parameter, or an addend. So the program's hooks are kept from autograd. When all gradients of the pass are reduced,
each one that has hooks is gathered on every rank. Every rank calls the hooks and keeps its own part of the result.
``torch.autograd.graph.register_multi_grad_hook`` is made of hooks on tensors, so this serves it too.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.layout.tensor_layout import TensorLayout, layout_of
from meshwright.mesh.axes import Mesh
from meshwright.parallel.autograd_graph import InPass, after_backward, in_backward, take_kept_node
from meshwright.parallel.batch.loss_gradients import LossGradients
from meshwright.parallel.collectives import maximum
from meshwright.parallel.gradients.program_hooks import Hook, ProgramHooks, on_every_rank
from meshwright.parallel.shards.sharded_parameter import is_shard, whole_gradient
from meshwright.parallel.shards.stand_in import reading_shards, values_of
from meshwright.temporarily import temporarily

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of gradients


class ReducedGradients(Protocol):
    """Where a reduction has put gradients."""

    def settle(self) -> None:
        """Take in what the program has set or cleared among the gradients."""

    def part(self, parameter: nn.Parameter) -> Tensor | None:
        """Return this rank's elements of a parameter's gradient, 1-d; None if there is no gradient."""

    def put(self, parameter: nn.Parameter, part: Tensor | None) -> None:
        """Replace what :meth:`part` returns."""

    def layout(self, parameter: nn.Parameter) -> TensorLayout:
        """Return which elements :meth:`part` has."""

    def is_unsynced(self, parameter: nn.Parameter) -> bool:
        """Return whether the gradient is of passes under ``no_sync`` that no pass has synchronised yet."""


@dataclass(frozen=True, eq=False)
class _Managed:
    """A parameter whose hooks the runtime runs.

    Args:
        parameter: the parameter.
        reduced: where its gradient is after a pass; None if only other stages of the pipeline have it.
        arriving: the hooks of ``register_hook``.
        accumulated: the hooks of ``register_post_accumulate_grad_hook``.
        earlier: a tensor whose graph has the node of autograd that the parameter had before the call, if it has another
            now.
    """

    parameter: nn.Parameter
    reduced: ReducedGradients | None
    arriving: ProgramHooks
    accumulated: ProgramHooks
    earlier: Tensor | None

    @property
    def part(self) -> Tensor | None:
        return None if self.reduced is None else self.reduced.part(self.parameter)

    def put(self, part: Tensor | None) -> None:
        if self.reduced is not None:
            self.reduced.put(self.parameter, part)

    @property
    def layout(self) -> TensorLayout:
        return layout_of(self.parameter) if self.reduced is None else self.reduced.layout(self.parameter)


class GradientHooks:
    """The program's hooks on the gradients of one model.

    Args:
        mesh: the axes over which the gradients are spread.
        parameters: all parameters of the model, in its order.

    Attributes:
        is_running: whether the program's hooks are being called.
        hooked: the parameters that have hooks of the program, by their ``id``.
    """

    def __init__(self, mesh: Mesh, parameters: Iterable[nn.Parameter]):
        self.is_running = False
        self.losses: LossGradients | None = None  # what must see each pass that brings gradients
        self._mesh = mesh
        self._order = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._is_off = False
        self._managed: dict[int, _Managed] = {}
        self.hooked: dict[int, _Managed] = {}
        self._end: weakref.ref[Callable[[], None]] | None = None  # None between passes
        self._of_pass: list[_Managed] = []
        self._positions: dict[int, int] = {}
        self._before: dict[int, Tensor | None] = {}

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return type(None), ()  # as GradientSync: the parameters of a copied model have no hooks

    def manage(
        self,
        parameter: nn.Parameter,
        reduced: ReducedGradients | None,
        *,
        arrive: Hook,
        accumulated: Hook,
        needs_arrival: bool = False,
        needs_gradient: bool = False,
    ) -> None:
        """Run a parameter's hooks from now on, those that it has included.

        Args:
            parameter: the parameter.
            reduced: where its gradient is after a pass; None if only other stages of the pipeline have it.
            arrive: the runtime's hook on the gradient that arrives.
            accumulated: the runtime's hook after the gradient was added to ``parameter.grad``.
            needs_arrival, needs_gradient: whether the runtime needs the first and the second of these although the
                program has no hooks.
        """
        with reading_shards():
            arriving = ProgramHooks(arrive, parameter._backward_hooks, self, parameter)
            after = ProgramHooks(accumulated, parameter._post_accumulate_grad_hooks, self, parameter)
            parameter._backward_hooks, parameter._post_accumulate_grad_hooks = arriving, after
        managed = self._managed[id(parameter)] = _Managed(
            parameter, reduced, arriving, after, take_kept_node(parameter)
        )
        if needs_arrival:
            arriving.turn_on()
        if needs_gradient:
            after.turn_on()
        if arriving or after:
            self._hook(managed)

    def manages(self, parameter: nn.Parameter) -> bool:
        """Return whether :meth:`manage` was called for a parameter."""
        return id(parameter) in self._managed

    def added(self, parameter: nn.Parameter) -> None:
        """Called when the program makes a hook.

        Raises:
            PlanError: if the hook would not see what it sees on one device.
        """
        managed = self._managed[id(parameter)]
        self._check(managed)
        self._hook(managed)

    def _hook(self, managed: _Managed) -> None:
        self.hooked[id(managed.parameter)] = managed
        managed.arriving.turn_on()
        managed.accumulated.turn_on()

    def removed(self, parameter: nn.Parameter) -> None:
        """Called when the program has removed a hook."""
        managed = self._managed[id(parameter)]
        if not (managed.arriving or managed.accumulated):
            self.hooked.pop(id(parameter), None)

    @property
    def count(self) -> int:
        """The number of the program's hooks."""
        return sum(len(one.arriving) + len(one.accumulated) for one in self.hooked.values())

    @property
    def are_any(self) -> bool:
        """Whether hooks are to run at the end of a pass."""
        return bool(self.hooked) and not self._is_off

    def off(self) -> contextlib.AbstractContextManager[None]:
        """Run no hooks for passes in this context, whose gradients are parts of a later pass's."""
        return temporarily(self, _is_off=True)

    def begin(self) -> None:
        """Run the hooks at the end of the backward pass that is running; called before its first gradient arrives."""
        if not self.are_any or self.is_running or (self._end is not None and self._end() is not None):
            return

        def run() -> None:
            self._end = None
            self._run()

        def end() -> None:  # when the callbacks that were added after this one are done
            torch.autograd.Variable._execution_engine.queue_callback(run)

        self._end = weakref.ref(end)  # only autograd keeps it, so a pass that raises drops it
        torch.autograd.Variable._execution_engine.queue_callback(end)
        hooked = [one for one in self.hooked.values() if one.arriving or one.accumulated]
        self._of_pass = sorted(hooked, key=lambda one: self._order[id(one.parameter)])
        self._positions = {}
        for reduced in dict.fromkeys(one.reduced for one in self._of_pass):
            if reduced is not None:
                reduced.settle()
        # Hooks see the gradient of this pass alone, so what was there before is put aside.
        self._before = {id(one.parameter): one.part for one in self._of_pass}
        for one in self._of_pass:
            one.put(None)

    def _check(self, managed: _Managed) -> None:
        name = layout_of(managed.parameter).name
        if in_backward():
            raise PlanError(
                f"a hook on the gradient of {name} was made inside of a backward pass, of which it would miss the "
                "gradient: hooks run when a pass ends and its gradients are reduced. Make it before the pass: "
                "parameter.register_hook(hook); loss.backward()"
            )
        with reading_shards():
            is_unsynced = managed.reduced is not None and managed.reduced.is_unsynced(managed.parameter)
        if is_unsynced:
            raise PlanError(
                f"a hook on the gradient of {name} was made after a backward pass under no_sync(), whose gradient is "
                "not reduced yet, so the hook would see the gradients of two passes as one. Make it before the first "
                "pass of the accumulation window, or after the last one"
            )

    def accumulated(self, parameter: nn.Parameter) -> None:
        """Called when a gradient of the running pass was added to ``parameter.grad``.

        Raises:
            PlanError: if it has arrived before, as under reentrant checkpointing, in which each part of the gradient
                has a pass of its own.
        """
        if id(parameter) not in self._before:
            return
        if id(parameter) in self._positions:
            raise PlanError(
                f"the gradient of {layout_of(parameter).name} arrives in several parts, since reentrant checkpoints "
                "run parts of the model in passes of their own, and one device would call the program's hook for each "
                "part. Call torch.utils.checkpoint with use_reentrant=False, or remove the hook"
            )
        self._positions[id(parameter)] = len(self._positions)

    def _run(self) -> None:
        with torch.no_grad(), reading_shards():
            found = self._agreed()
            arrived = {id(one.parameter) for one, _, _ in found}
            for one in self._of_pass:
                if id(one.parameter) not in arrived:
                    one.put(self._before.get(id(one.parameter)))
        if not found:
            return

        def run() -> None:
            with torch.no_grad(), after_backward():
                for one, dtype, has_before in found:
                    self._run_one(one, dtype, has_before)

        earlier = [one.earlier for one, _, _ in found if one.earlier is not None]
        with temporarily(self, is_running=True):
            if not earlier and all(_is_executed(one.parameter) for one, _, _ in found):
                run()
                return
            # Hooks of several tensors count how many of these the running pass reaches, which is here to be all.
            with torch.enable_grad(), reading_shards():
                root = InPass.apply(run, *(one.parameter for one, _, _ in found), *earlier)
            root.backward()

    def _agreed(self) -> list[tuple[_Managed, torch.dtype, bool]]:
        """Return what has a gradient on any rank, in the order of arrival, which is the same on every rank.

        Each comes with the dtype of the gradient, and whether there was one before the pass. A pipeline's stages
        compute all of their gradients before these arrive, so there the order is that of the model from its end.
        """
        count, is_staged = len(self._of_pass), self._mesh.pp.size > 1
        rows = []
        for index, one in enumerate(self._of_pass):
            part, before = one.part, self._before[id(one.parameter)]
            row = [0, 0, int(before is not None)]
            if part is not None:
                arrived = self._positions.get(id(one.parameter), count - 1)
                row[:2] = count - (count - 1 - index if is_staged else arrived), 1 + _DTYPES.index(part.dtype)
            rows.append(row)
        numbers = torch.tensor(rows, dtype=torch.int64, device=self._of_pass[0].parameter.device)
        for axis in self._mesh.factors.values():
            maximum(numbers, axis)
        found = sorted(enumerate(numbers.tolist()), key=lambda item: -item[1][0])
        return [
            (self._of_pass[index], _DTYPES[dtype - 1], bool(before)) for index, (place, dtype, before) in found if place
        ]

    def _run_one(self, one: _Managed, dtype: torch.dtype, has_before: bool) -> None:
        parameter, before = one.parameter, self._before.pop(id(one.parameter))
        with reading_shards():
            part = one.part
            given = self._whole(part, one, dtype)
            kept = _kept(given, dtype)
        for hook in one.arriving.values():
            if (changed := hook(given)) is not None:
                given = self._whole_again(_checked(changed, hook, one), one, dtype)
        with reading_shards():
            part = self._own(given, kept, part, one, dtype)
            if before is not None and part is not None:
                part = before.add_(part)
        if one.accumulated:
            with reading_shards():
                # Hooks of the first kind may have kept what they saw.
                whole = self._whole(part, one, dtype) if has_before else given.clone() if one.arriving else given
                kept = _kept(whole, dtype)
            with whole_gradient(parameter, whole):
                for hook in one.accumulated.values():
                    hook(parameter)
                left = parameter.grad
            left = None if left is None else _checked(left, "of .grad", one)
            with reading_shards():
                part = None if left is None else self._own(left, kept, part, one, dtype)
        with reading_shards():
            one.put(part)

    def _whole(self, part: Tensor | None, one: _Managed, dtype: torch.dtype) -> Tensor:
        """Return the whole of a gradient of which each rank has a part, in the dtype of the parameter."""
        if part is None:  # of another stage, or a part in which no element is not zero
            part = torch.zeros(one.layout.local_numel, dtype=dtype, device=one.parameter.device)
        return on_every_rank(part.to(dtype), one.layout, self._mesh).to(one.parameter.dtype)

    def _whole_again(self, result: Tensor, one: _Managed, dtype: torch.dtype) -> Tensor:
        """Return what a hook has made of a gradient, whole on every rank."""
        if one.layout.is_staged or is_shard(result):  # the values of the parameter may be in it
            with reading_shards():
                return self._whole(self._own(result, None, None, one, dtype), one, dtype)
        return result.detach().to(one.parameter.dtype)

    def _own(
        self, result: Tensor, kept: Tensor | None, part: Tensor | None, one: _Managed, dtype: torch.dtype
    ) -> Tensor | None:
        """Return this rank's elements of what hooks have left of a gradient."""
        if not one.layout.is_held:
            return None
        if is_shard(result):
            values = values_of(result)
            own = one.layout.own(result.as_subclass(Tensor)) if values is None else values.own()
            return own.detach().to(dtype)
        if kept is not None and part is not None and torch.equal(result, kept):
            return part  # which has bits that the dtype of the parameter lacks
        return one.layout.take(result.detach()).reshape(-1).to(dtype)


def _checked(result: object, hook: object, one: _Managed) -> Tensor:
    """Return what a hook has made of a gradient; raise as torch does if it cannot be one."""
    if not isinstance(result, Tensor):
        raise TypeError(f"expected Variable, but hook {hook!r} returned {type(result).__name__}")
    if result.shape != one.layout.shape:
        raise RuntimeError(
            f"hook {hook!r} has changed the size of the gradient of {layout_of(one.parameter).name} from "
            f"{list(one.layout.shape)} to {list(result.shape)}"
        )
    return result


def _kept(gradient: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return a copy of a gradient that has lost bits in the dtype of its parameter; None for any other."""
    return None if gradient.dtype is dtype else gradient.clone()


def _is_executed(parameter: nn.Parameter) -> bool:
    """Return whether the running pass reaches a parameter on this rank."""
    with reading_shards():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    return torch._C._will_engine_execute_node(node)
