"""The steps of all optimizers of this process: their checks, and the order of the hooks around them.

Every optimizer that has such parameters is checked, not only the model's own one.

The hooks of torch are never removed. torch iterates over its hooks while a step runs, in which a model may be freed
whose watcher would remove its hooks.

Between steps the groups of an optimizer have the model's parameters, under ZeRO too, so a program that reads or writes
them there does what it does with the model's own. Slices and whole parameters take their place during the step alone.
The program's hooks of the step run inside of this window if the optimizer steps whole parameters, and outside of it
otherwise.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from meshwright.errors import OptimizerMismatchError
from meshwright.layout.tensor_layout import layout_of
from meshwright.optim.chained import members
from meshwright.optim.elementwise import check_elementwise
from meshwright.optim.runtime import Runtime, find_runtime
from meshwright.parallel.autograd_graph import in_backward
from meshwright.parallel.shards.partial_gradients import StepWindow
from meshwright.temporarily import replace_method

logger = logging.getLogger(__name__)

_watchers: list[weakref.ref[StepWatcher]] = []
_hooks: list[object] = []


def watch_steps(runtime: Runtime, *, is_trusted: bool) -> None:
    """Make an optimizer step raise if it would use unreduced gradients, or would not reach the parameters.

    Under a pipeline the weights that a stage holds whole have gradients that are marked as this rank's, so an optimizer
    that was not passed to the call gets the window that the model's own one has.

    Args:
        runtime: the runtime of a distributed model, which keeps what watches.
        is_trusted: see ``check_elementwise``.
    """
    watch_every_step(runtime.features.add(_StepWatch(runtime, is_trusted=is_trusted), is_copied=False))


class _StepWatch:
    def __init__(self, runtime: Runtime, *, is_trusted: bool):
        self._runtime, self._is_trusted = weakref.ref(runtime), is_trusted
        self._has_warned = self._has_logged = False
        self._window = StepWindow()

    def before_step(self, optimizer: Optimizer) -> Callable[[], None] | None:
        if (of := self._runtime()) is None or of.gradients.trained is None or of.engine is not None:
            return None
        _look(optimizer, of, self._is_trusted)
        is_own = find_runtime(optimizer) is not None
        if of.mesh.tokens.size > 1:
            self._warn(optimizer, of, is_own=is_own)
        # In a hook, what a window would show of a gradient is not the whole that the hook sees.
        is_in_hook = of.gradients.hooks is not None and of.gradients.hooks.is_running
        if of.mesh.pp.size > 1 and not is_own and not is_in_hook and of.gradients.are_stepped_by(optimizer):
            self._window.close()  # of a step that raised, if the program has kept its error
            self._window = StepWindow()
            self._window.open(optimizer)
            return self._window.close
        return None

    def _warn(self, optimizer: Optimizer, of: Runtime, *, is_own: bool) -> None:
        """Warn once of an optimizer that ZeRO does not shard, and of parameters that are in no distributed model."""
        stage = 0 if of.plan is None else of.plan.zero_stage
        can_shard = stage in (1, 2) and not of.gradients.has_optimizer
        if can_shard and not self._has_logged and of.gradients.are_stepped_by(optimizer):
            self._has_logged = True
            if dist.get_rank() == 0:
                logger.warning(
                    "this %s was made after the call and not passed to it, so zero_stage=%d shards nothing: each of "
                    "the %d data-parallel ranks keeps the whole optimizer state. Pass it: model, optimizer, _ = "
                    "meshwright.to_distributed(model, optimizer)",
                    type(optimizer).__name__, stage, of.mesh.tokens.size,
                )  # fmt: skip
        if self._has_warned or is_own:
            return
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        strangers = [p for p in trained if not hasattr(p, "meshwright") and not isinstance(p, DTensor)]
        if strangers:
            self._has_warned = True
            logger.warning(
                "%s.step() trains %d parameter(s) that are in no distributed model (the first has shape %s). "
                "Unless the program averages their gradients, each data-parallel rank steps them by its own rows' "
                "gradients only, and the ranks' values diverge. Make them a part of the model before to_distributed, "
                "or wrap the module that has them: meshwright.DataParallel(module)",
                type(optimizer).__name__, len(strangers), list(strangers[0].shape),
            )  # fmt: skip

    def after_step(self, optimizer: Optimizer) -> None:
        self._window.close()


def _look(optimizer: Optimizer, runtime: Runtime, is_trusted: bool) -> None:
    is_own, hooks = find_runtime(optimizer) is runtime, runtime.gradients.hooks
    is_in_pass = in_backward() or (is_own and hooks is not None and hooks.is_running)
    if is_own and not is_in_pass:
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if is_in_pass:
        reduced = [p for sync in runtime.gradients.syncs for bucket in sync.buckets for p in bucket.parameters]
        if names := [layout_of(p).name for p in reduced if is_own or id(p) in stepped]:
            raise ValueError(
                f"{type(optimizer).__name__}.step() ran inside of a backward pass, on {names[0]} and {len(names) - 1} "
                "more parameter(s) whose gradients are reduced only when the pass ends, so the replicas would drift "
                "apart. Move the step out of the hook: loss.backward(); optimizer.step(). A hook of "
                "register_post_accumulate_grad_hook may step an optimizer of its parameter alone, which is not passed "
                "to the call"
            )
    if is_own:
        return
    zero = runtime.gradients.zero
    # A shallow copy of the model's optimizer has the slices.
    own = () if zero is None else (*((p, p) for p in zero.parameters), *((s.parameter, s.shard) for s in zero.slices))
    if names := [layout_of(p).name for p, of_step in own if id(of_step) in stepped]:
        raise OptimizerMismatchError(
            f"this {type(optimizer).__name__} was not distributed with the model, but steps {names[0]} and "
            f"{len(names) - 1} more parameter(s) that ZeRO shards over the data-parallel ranks. Its step would "
            "change none of them. Pass a single optimizer with several groups: "
            "to_distributed(model, AdamW([{'params': a}, {'params': b, 'lr': 1e-4}]), loader), or several in one "
            "mw.ChainedOptimizer(first, second); or use zero_stage=0"
        )
    if any(id(p) in stepped and layout_of(p).is_sharded for p in runtime.gradients.parameters):
        check_elementwise(optimizer, is_trusted=is_trusted, plan=runtime.plan)


class StepWatcher(Protocol):
    """What is told of the steps of all optimizers."""

    def before_step(self, optimizer: Optimizer) -> Callable[[], None] | None:
        """Called before each step of each optimizer; returns what to call too at its end if it raises."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after each step of each optimizer."""


def watch_every_step(watcher: StepWatcher) -> None:
    """Tell a watcher of the steps of all optimizers from now on, as long as something else refers to it."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before))
        _hooks.append(register_optimizer_step_post_hook(_after))
    _watchers[:] = [reference for reference in _watchers if reference() is not None]
    _watchers.append(weakref.ref(watcher))


class _Arguments(dict[str, Any]):
    """The named arguments of a step, which go with its frame."""


def _before(optimizer: Optimizer, args: object, kwargs: dict[str, Any]) -> Any:
    watchers = [watcher for reference in _watchers if (watcher := reference()) is not None]
    ends = [end for watcher in watchers if (end := watcher.before_step(optimizer)) is not None]
    if not ends:
        return None
    given = _Arguments(kwargs)
    for end in ends:  # torch calls no hook of a step that raises
        weakref.finalize(given, end).atexit = False
    return args, given


def _after(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for watcher in [reference() for reference in _watchers]:
        if watcher is not None:
            watcher.after_step(optimizer)


class StepHooks:
    """Keeps the program's hooks of a step inside of the hooks of the call, or outside of them, whenever it adds them.

    Inside, hooks have the whole parameters and gradients that an owner steps. Outside, they have those of the model, as
    the loop has them before and after the step.

    Args:
        optimizer: the optimizer, to which the call adds its hooks between the construction of this object and the call
            of :meth:`arrange`.
        is_inside: whether all of its parameters are stepped whole.
    """

    def __init__(self, optimizer: Optimizer, *, is_inside: bool):
        self._optimizer, self._is_inside = optimizer, is_inside
        self._theirs = {*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks}
        self._ours: set[int] = set()
        self._is_called, self._depth = False, 0

    def surround(self, ends: Sequence[Callable[[], object]]) -> None:
        """Run the hooks of the call around the whole step, once, and functions in their place if the step raises.

        torch leaves out the hooks that end a step that raises. It runs all hooks a second time inside of a step that
        calls the step of the class that it is derived from, if that class has been used by itself.

        Args:
            ends: the functions, in their order.
        """
        self._ours = {*self._pre, *self._post} - self._theirs
        first = next(key for key in self._pre if key in self._ours)
        last = next(key for key in reversed(self._post) if key in self._ours)
        for hooks in (self._pre, self._post):
            for key in self._ours & hooks.keys():
                hooks[key] = functools.partial(self._run, hooks[key], begins=key == first, ends=key == last)
        step = self._optimizer.step

        def run(_: Optimizer, *args: Any, **kwargs: Any) -> object:
            self._is_called, self._depth = True, 0
            try:
                return step(*args, **kwargs)
            except BaseException:
                for end in ends:
                    end()
                raise
            finally:
                self._is_called, self._depth = False, 0

        replace_method(self._optimizer, "step", run)

    def _run(self, hook: Callable[..., Any], *args: Any, begins: bool, ends: bool) -> Any:
        if begins:
            self._depth = 1 + self._depth * self._is_called
        result = hook(*args) if self._depth <= 1 else None
        if ends:
            self._depth -= 1
        return result

    def arrange(self) -> None:
        """Put the hooks in order, now and whenever the program adds one."""
        self._sort()
        for name in ("register_step_pre_hook", "register_step_post_hook"):
            register = functools.partial(self._register, getattr(self._optimizer, name))
            setattr(self._optimizer, name, register)
        for each in members(self._optimizer):
            if each is not self._optimizer and not self._is_inside:
                each.register_step_pre_hook = functools.partial(_late_hook, type(each).__name__)  # type: ignore[method-assign]
                each.register_step_post_hook = functools.partial(_late_hook, type(each).__name__)  # type: ignore[method-assign]

    @property
    def _pre(self) -> OrderedDict[int, Any]:
        return self._optimizer._optimizer_step_pre_hooks  # type: ignore[return-value]

    @property
    def _post(self) -> OrderedDict[int, Any]:
        return self._optimizer._optimizer_step_post_hooks  # type: ignore[return-value]

    def _register(self, register: Callable[[Any], RemovableHandle], hook: Any) -> RemovableHandle:
        handle = register(hook)
        self._sort()
        return handle

    def _sort(self) -> None:
        for hooks, ours_first in ((self._pre, self._is_inside), (self._post, not self._is_inside)):
            for key in [key for key in hooks if (key in self._ours) != ours_first]:
                hooks.move_to_end(key)


def _late_hook(name: str, hook: object) -> RemovableHandle:
    raise ValueError(
        f"this {name} is a part of a distributed ChainedOptimizer and steps parts of parameters, which a hook of its "
        f"step would read as whole ones. Register the hook before to_distributed, so that {name} steps whole "
        "parameters; or register it on the chain, where it runs before or after the whole step"
    )
