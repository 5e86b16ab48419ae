"""Observes the steps of a training loop from hooks, without a call by the program and without waiting for the device.

Between two lines a step costs four readings of the host's clock and an addition of the batch's tokens. The loss and the
norm are kept in the steps of a line only. The time of a step by part is measured where the parts begin.
"""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.data.peers import waited_for_data
from meshwright.faults import interpose
from meshwright.monitor.figures import PARTS, RankFigures
from meshwright.monitor.held_memory import peak_memory
from meshwright.optim.chained import members, stepping
from meshwright.optim.runtime import Runtime, find_runtime
from meshwright.optim.steps import watch_every_step
from meshwright.parallel.autograd_graph import loss_of
from meshwright.parallel.batch.schema import BatchSchema

_SAMPLED = 10  # on CUDA, the parts of every tenth step are recorded, and those of the steps before a line


class StepObserver:
    """Counts the steps, the tokens and the time of a distributed model.

    Args:
        model: the model.
        runtime: its runtime.
        decoder: the module inside the model's wrappers, which a program may call too.
        device: the device of this rank.
        flops: function of a row's length that returns the FLOPs of forward and backward for one of its tokens; None if
            the model's sizes are unknown.
        is_due: function of the number of steps since the start that says whether a line follows that step.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        decoder: nn.Module,
        *,
        device: torch.device,
        flops: Callable[[int], float] | None,
        is_due: Callable[[int], bool],
    ) -> None:
        self.steps = 0  # since the start of the program
        self.batch: tuple[int, int] | None = None  # rows and tokens per row of the last forward pass in training
        self.has_begun = False  # True from the first forward pass in training
        self.passes = 0  # forward passes in the running step
        self.passes_per_step = 1
        self.on_batch: Callable[[], None] = lambda: None  # called before the first forward pass in training
        self.on_due: Callable[[Tensor | None, Tensor | None, Any], None] = lambda loss, norm, lr: None
        self._runtime, self._device, self._is_due = runtime, device, is_due
        self._flops = None if flops is None else functools.lru_cache(maxsize=256)(flops)
        self._modules = {id(x): weakref.ref(x) for x in (model, decoder)}
        self._running: nn.Module | None = None
        self._lead: weakref.ref[Optimizer] | None = None
        self._losses: list[Tensor] = []
        self._own_losses: list[Tensor] = []
        self._norm: Tensor | None = None
        self._keeps = self._is_sampled = is_due(1)
        self._parts: CudaParts | HostParts = CudaParts() if device.type == "cuda" else HostParts()
        self._after_first = 0.0  # when the first step ended
        self.begin_interval()
        for module in {id(x): x for x in (model, decoder)}.values():
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)
        if runtime.engine is None:
            watch_every_step(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepObserver:
        return self  # the hooks of a copied model do nothing, since they know the original one

    # ---- one interval

    def begin_interval(self) -> None:
        """Begin to measure the time, the tokens and the waiting of the next line."""
        self._since = time.perf_counter()
        self._first, self._tokens, self._done = self.steps, 0, 0.0
        self._waited, self._read = interpose.waited(), waited_for_data()

    @property
    def seconds_per_step(self) -> float | None:
        """The mean seconds of a step since the first one; None before the second one."""
        return None if self.steps < 2 else (time.perf_counter() - self._after_first) / (self.steps - 1)

    def take(self) -> RankFigures:
        """Return this rank's figures of the interval that ends now, and begin the next one."""
        steps = max(1, self.steps - self._first)
        seconds, parts = time.perf_counter() - self._since, self._parts.take(steps)
        if self._device.type == "cuda":
            parts["between"] = max(0.0, seconds / steps - sum(parts.values())) if any(parts.values()) else 0.0
        figures = RankFigures(
            seconds=seconds,
            steps=steps,
            tokens=self._tokens,
            flops=self._done,
            waited=interpose.waited() - self._waited,
            peak=peak_memory(self._device),
            read=waited_for_data() - self._read,
            parts=parts,
        )
        self.begin_interval()
        return figures

    # ---- what the program does

    def saw_norm(self, norm: Tensor) -> None:
        """See ``meshwright.optim.runtime.Watch``."""
        if self._keeps:
            self._norm = norm.detach()

    def saw_loss(self, loss: Tensor) -> None:
        """See ``meshwright.optim.runtime.Watch``."""
        if self._keeps and torch.is_grad_enabled():
            self._own_losses.append(loss.detach())

    def end_step(self, *, lr: Tensor | float | None, norm: Tensor | None) -> None:
        """Count a step, and tell ``on_due`` if a line follows it.

        Args:
            lr: the step's learning rate.
            norm: the gradient norm, if an engine has computed it.
        """
        self._begin()  # if no forward pass was seen: a model that is compiled as a whole
        self._parts.begin("between", is_sampled=self._is_sampled)
        self.steps += 1
        if self.steps == 1:
            self._after_first = time.perf_counter()
        self.passes_per_step, self.passes = max(1, self.passes), 0
        if self._keeps:
            losses = self._own_losses or self._losses
            loss = torch.stack([value.reshape(()) for value in losses]).mean() if losses else None
            self.on_due(loss, self._norm if norm is None else norm, lr)
        self._losses, self._own_losses, self._norm = [], [], None
        self._keeps = self._is_due(self.steps + 1)
        self._is_sampled = self._keeps or (self.steps + 1) % _SAMPLED == 0

    def _begin(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.on_batch()
            self.begin_interval()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # the graph of a whole compiled model would freeze what is counted here
        if self._running is not None or not module.training or not torch.is_grad_enabled():
            return
        if (known := self._modules.get(id(module))) is None or known() is not module:
            return
        self._running = module
        shape = _shape_of_ids(args, kwargs)
        if shape is not None:
            self.batch = shape
        self._begin()
        if shape is not None:
            rows, length = shape
            self._tokens += rows * length
            if self._flops is not None:
                self._done += rows * length * self._flops(length)
        self.passes += 1
        self._parts.begin("forward", is_sampled=self._is_sampled)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if torch.compiler.is_compiling() or module is not self._running:
            return
        self._running = None
        self._parts.begin("backward", is_sampled=self._is_sampled)
        if self._keeps and (loss := loss_of(output)) is not None:
            self._losses.append(loss.detach())

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before each step of each optimizer."""
        if self._leads(optimizer):
            self._parts.begin("optimizer", is_sampled=self._is_sampled)

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after each step of each optimizer."""
        if self._leads(optimizer):
            self.end_step(lr=optimizer.param_groups[0]["lr"] if self._keeps else None, norm=None)

    def _leads(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's step counts as the model's; of several optimizers, only that of the first."""
        if members(optimizer)[0] not in stepping(optimizer):
            return False
        if self._lead is not None and (lead := self._lead()) is not None:
            return lead is optimizer
        gradients, is_own = self._runtime.gradients, find_runtime(optimizer) is self._runtime
        is_own = is_own or (not gradients.has_optimizer and gradients.are_stepped_by(optimizer))
        if is_own:
            self._lead = weakref.ref(optimizer)
        return is_own


def _shape_of_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """Return the rows and the tokens per row of a batch; None if it has no tokens."""
    schema = BatchSchema({"input_ids": args[0], **kwargs} if args else kwargs)
    if not schema.has_tokens or schema.tokens.ndim != 2 + schema.tokens.is_floating_point():
        return None
    return schema.tokens.shape[0], schema.tokens.shape[1]


class HostParts:
    """Adds up the host's seconds in each part; on CPU, operations end before the host goes on."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(PARTS, 0.0)
        self._part, self._since = "between", time.perf_counter()

    def begin(self, part: str, *, is_sampled: bool) -> None:
        """End the running part, and begin another one."""
        now = time.perf_counter()
        self._sums[self._part] += now - self._since
        self._part, self._since = part, now

    def take(self, steps: int) -> dict[str, float]:
        """Return the seconds of each part per step, and begin anew."""
        found = {name: value / steps for name, value in self._sums.items()}
        self._sums = dict.fromkeys(PARTS, 0.0)
        return found


class CudaParts:
    """Records events on the device where the parts of sampled steps begin; nobody waits for them.

    What lies between the steps is not recorded.
    """

    def __init__(self) -> None:
        self._running: list[tuple[str, Any]] = []
        self._ended: list[list[tuple[str, Any]]] = []

    def begin(self, part: str, *, is_sampled: bool) -> None:
        """Begin another part; it is recorded if the step is sampled."""
        if not is_sampled:
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._running.append((part, event))
        if part == "between":
            self._ended, self._running = [*self._ended[-1:], self._running], []

    def take(self, steps: int) -> dict[str, float]:
        """Return the seconds of each part in the newest sampled step that the device has finished."""
        sums = dict.fromkeys(PARTS, 0.0)
        done = [events for events in self._ended if events[-1][1].query()]
        for (part, event), (_, following) in itertools.pairwise(done[-1] if done else []):
            sums[part] += 1e-3 * event.elapsed_time(following)
        return sums
