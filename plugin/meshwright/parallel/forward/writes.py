"""State that a model's forward writes: what one device writes once, from all rows, must not be written per part.

A plan may run forward on each rank's rows, and once for each micro-batch. Three checks find where this gives other
numbers. Layers that are known to mix rows are refused by name (``mixed_rows.py``). What forward writes on the rows of
one rank differs between ranks, and the comparison of replicas finds it in the first steps (``replicas/comparison.py``).
What forward writes once for each micro-batch is found here, by the version counters of the tensors, which cost no
device wait.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.faults.guard import Guard
from meshwright.faults.together import raise_if_any, succeed_together
from meshwright.parallel.async_numbers import is_deferred
from meshwright.parallel.autograd_graph import in_backward
from meshwright.parallel.method_chain import ChainStep, StepOrder, add_step
from meshwright.parallel.replicas.replicate_model import is_comparable
from meshwright.parallel.shards.stand_in import reading_shards

logger = logging.getLogger(__name__)

_FIRST = 3  # calls in which Python numbers, and values on a device, are compared too
_Place = tuple[nn.Module, str, str]  # a module, the name of its attribute, and the attribute's name in the model


class _WatchedState:
    """The tensors that a model holds, and when each was written last, by torch's version counters."""

    def __init__(self, facts: Facts):
        self.places = list(_places(facts, Tensor))
        self.weights = list(facts.named_parameters())

    def moments(self) -> list[tuple[object, int]]:
        """Return each tensor that is no weight, and its version."""
        values = [_value(module, key) for module, key, _ in self.places]
        return [(x, x._version if isinstance(x, Tensor) and not x.is_inference() else 0) for x in values]

    def moments_of_weights(self) -> list[int]:
        """Return the version of each weight."""
        with reading_shards():  # reading a guarded parameter's property takes microseconds
            return [weight._version for _, weight in self.weights]


class ForwardWrites:
    """Tells whether the first training passes of a model, or passes before them, write any of its tensors."""

    def __init__(self, facts: Facts):
        self._state = _WatchedState(facts)
        self._passes = 0
        self._before: tuple[list[tuple[object, int]], list[int]] | None = None

    def begin(self, *, trains: bool) -> None:
        """Called at the start of a pass; only those that train are counted, since a run may begin with evaluation."""
        self._passes += trains
        if self._passes <= _FIRST:
            self._before = self._state.moments(), self._state.moments_of_weights()

    def end(self) -> bool:
        """Called at the end of a pass; returns whether it has written a tensor. Later passes are not watched."""
        if self._before is None:
            return False
        (tensors, weights), self._before = self._before, None
        return weights != self._state.moments_of_weights() or any(map(_is_written, tensors, self._state.moments()))


def _is_written(before: tuple[object, int], now: tuple[object, int]) -> bool:
    return before[0] is not now[0] or before[1] != now[1]


class WritesInRecompute(ChainStep):
    """The ``forward`` of a module that backward runs again: raises if this writes state of the module a second time.

    Args:
        modules: the module, inside a layer that the plan recomputes, and its children, since their hooks may write
            too, such as the pre-hook of ``torch.nn.utils.spectral_norm``; by their names in the model.
    """

    order = StepOrder.RECOMPUTED

    def __init__(self, modules: dict[str, nn.Module]):
        self.modules = modules

    @staticmethod
    def over(model: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Watch the modules inside of layers."""
        names = {module: name for name, module in model.named_modules()}
        for module in dict.fromkeys(inner for layer in layers for inner in layer.modules()):
            watched = {names[x]: x for x in (module, *_called_by(module)) if any(_own(x, Tensor))}
            if watched:
                add_step(module, WritesInRecompute(watched))

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not in_backward():
            return self.method(*args, **kwargs)
        before = self._tensors()
        try:
            return self.method(*args, **kwargs)
        finally:  # recomputation may end a layer early, by an exception
            after = self._tensors()
            for name in before.keys() & after.keys():
                if before[name].shape == after[name].shape and not torch.equal(before[name], after[name]):
                    refuse = functools.partial(self._refuse, name)
                    torch.autograd.Variable._execution_engine.queue_callback(refuse)

    def _tensors(self) -> dict[str, Tensor]:
        values = {f"{name}.{key}": _value(x, key) for name, x in self.modules.items() for key in _own(x, Tensor)}
        return {name: _bits(x).clone() for name, x in values.items() if isinstance(x, Tensor) and is_comparable(x)}

    def _refuse(self, name: str) -> None:
        """Raise at the end of backward."""
        raise PlanError(
            f"forward changes {name}, and recompute='full' runs the layer's forward again in backward, so it is "
            "changed twice in a step, and the gradients are not those of one device. Use recompute='none', or change "
            "it in the training loop instead of in forward"
        )


def _called_by(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module, and those of lists and tables of modules, which have no forward."""
    for child in module.children():
        yield from _called_by(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else (child,)


class WritesPerPiece:
    """Finds state that forward writes in each micro-batch, although one device would write it once per batch.

    It is legal to write the same value in each micro-batch, such as a table of rotary frequencies. A tensor that the
    second micro-batch changes again raises; a Python number that it changes again, such as a counter of calls, is
    named in a warning, since it may be used for nothing but a log.

    Args:
        facts: what the model shows.
        guard: the guard, by which all ranks raise if one has found something; None on one process.
        layers: the decoder's layers, if the stages of a pipeline hold them. A save takes buffers from the first stage.
    """

    def __init__(self, facts: Facts, guard: Guard | None, layers: Iterable[nn.Module] = ()):
        self._state = _WatchedState(facts)
        staged = {id(module) for layer in layers for module in facts.inside(layer)}
        self._saved_from_first = [
            id(module) in staged and key in module._buffers and key not in module._non_persistent_buffers_set
            for module, key, _ in self._state.places
        ]
        self._number_places = list(_places(facts, int | float))
        self._guard = guard
        self._calls = 0
        self._seen: list[tuple[object, int]] = []
        self._first: dict[int, Tensor] = {}
        self._numbers: list[object] = []
        self._versions: list[int] = []
        self._written: dict[int, Tensor] = {}
        self._changes: list[int] = []
        self._error: PlanError | None = None

    @property
    def _is_early(self) -> bool:
        return self._calls <= _FIRST

    def start(self) -> None:
        """Called at the start of each call of the model, before its first micro-batch."""
        self._calls += 1
        self._seen, self._first, self._error = self._state.moments(), {}, None
        if self._is_early:
            self._numbers = [_value(module, key) for module, key, _ in self._number_places]
            self._changes = [0] * len(self._numbers)
            self._versions, self._written = self._state.moments_of_weights(), {}

    def look(self) -> None:
        """Called after the forward of each micro-batch, or of a stage's part of it; keeps the first error."""
        seen = self._state.moments()
        for index, (before, now) in enumerate(zip(self._seen, seen, strict=True)):
            if _is_written(before, now) and isinstance(now[0], Tensor):
                self._compare(index, now[0])
        self._seen = seen
        if self._is_early:
            for index, (module, key, name) in enumerate(self._number_places):
                if (value := _value(module, key)) != self._numbers[index]:
                    self._numbers[index] = value
                    self._changes[index] += 1
                    if self._changes[index] == 2:
                        self._warn(name)
            self._look_at_weights()

    def _look_at_weights(self) -> None:
        """Find weights that forward has written twice, without the writes of ZeRO stage 3, which a layer refuses."""
        versions = self._state.moments_of_weights()
        with reading_shards():
            for index, (before, now) in enumerate(zip(self._versions, versions, strict=True)):
                name, weight = self._state.weights[index]
                if before == now:
                    continue
                bits = _bits(weight)
                if not torch.equal(self._written.setdefault(index, bits.clone()), bits) and self._error is None:
                    self._error = _changed(name)
        self._versions = versions

    def finish(self) -> None:
        """Called after the last micro-batch of a call. In the first calls all ranks make it.

        Raises:
            PlanError: if forward has changed state in two micro-batches; in the first calls on every rank.
        """
        error, guard = self._error, self._guard
        self._error, self._first, self._seen = None, {}, []
        if self._is_early and guard is not None and guard.is_current:
            is_same = guard.agree("micro-batches", "" if error is None else "a change of state")
            if not is_same:
                succeed_together(lambda: raise_if_any(error))
        raise_if_any(error)

    def _compare(self, index: int, value: Tensor) -> None:
        if self._error is not None or not is_comparable(value) or (is_deferred(value.device) and not self._is_early):
            return
        if self._saved_from_first[index]:
            self._error = PlanError(
                f"forward changes the buffer {self._state.places[index][2]}, which only the stage of its layer would "
                "know under ParallelPlan.pp > 1, so a checkpoint would hold its old value. Register it with "
                "persistent=False, or use pp=1"
            )
            return
        bits = _bits(value)
        first = self._first.setdefault(index, bits.clone())
        if first.shape == bits.shape and not torch.equal(first, bits):
            self._error = _changed(self._state.places[index][2])

    def _warn(self, name: str) -> None:
        if self._calls == 1:
            logger.warning(
                "forward changes %s in each micro-batch, but one device changes it once for the whole batch. If "
                "numbers follow from it, such as a schedule, they are not those of one device. Change it in the "
                "training loop instead, before model(**batch)",
                name,
            )


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _changed(name: str) -> PlanError:
    return PlanError(
        f"forward changes {name} in each micro-batch, but one device changes it once for the whole batch, so what "
        "follows from it would not be the number of one device. Run the batch in one piece "
        "(gradient_accumulation_steps=1, micro_batch_size=None, pp=1), or change it in the training loop instead of in "
        f"forward:\n    model.{name}.copy_(...)  # under torch.no_grad(), before model(**batch)"
    )


def _places(facts: Facts, kind: object) -> Iterator[_Place]:
    """Yield where modules hold values of a kind, other than parameters; buffers also where they are None."""
    for module, path in facts.names.items():
        for key in _own(module, kind):
            yield module, key, f"{path}.{key}".lstrip(".")


def _own(module: nn.Module, kind: Any) -> list[str]:
    own = {**vars(module), **{key: torch.empty(0) if x is None else x for key, x in module._buffers.items()}}
    return [key for key, x in own.items() if isinstance(x, kind) and not isinstance(x, bool | nn.Parameter)]


def _value(module: nn.Module, key: str) -> object:
    return module._buffers[key] if key in module._buffers else vars(module).get(key)
