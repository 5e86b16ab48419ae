"""What a program may read of an optimizer that steps parts, or steps parameters whole on their owners; all else raises.

The keys of such a state may be tensors that the program does not know, so a parameter would seem to have no state.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import UnreadableTensorError
from meshwright.parallel.shards.stand_in import StandIn, become


class StateOfParts(defaultdict[Any, Any]):
    """The state as an optimizer has it while it steps.

    Attributes:
        why: why a rank has only a part, as a clause.
    """

    why = ""


class ClosedState(StateOfParts):
    """The state as the program has it between steps, which it may clear and ask whether it is empty."""

    def __bool__(self) -> bool:
        return dict.__len__(self) > 0

    def _refuse(self, *_: object) -> NoReturn:
        raise UnreadableTensorError(
            f"{self.why}, so optimizer.state would give a part of what one device has, or nothing. To read the "
            "whole state, call meshwright.save_optimizer(model, optimizer, folder) on all ranks: its files have each "
            "tensor as state/PARAMETER/NAME. To start with a new state, call optimizer.state.clear() on all ranks. A "
            "copy of the optimizer cannot step: call step() of the one that to_distributed returned. (This rank's part "
            "is dict.items(optimizer.state).)"
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = get = setdefault = pop = popitem = _refuse
    update = _refuse  # type: ignore[assignment]
    __iter__ = __reversed__ = __len__ = keys = values = items = copy = __copy__ = __or__ = __ror__ = __ior__ = _refuse


def close_state(optimizers: Sequence[Optimizer], why: str) -> None:
    """Let only the steps of optimizers read their state by parameters.

    Args:
        optimizers: an optimizer, or a chain with its members, which share a state.
        why: why a rank has only a part, as a clause.
    """
    state = StateOfParts(dict, optimizers[0].state)
    state.why = why
    for optimizer in optimizers:
        optimizer.state = state
    become(state, ClosedState)


def state_of(optimizer: Optimizer, stepped: Tensor | None) -> dict[str, Any]:
    """Return the state of what this rank steps of a parameter; empty if there is none."""
    state: dict[Any, dict[str, Any]] = optimizer.state
    return dict.get(state, stepped, {})


@contextlib.contextmanager
def open_state(optimizer: Optimizer) -> Iterator[dict[Any, Any]]:
    """Return an optimizer's state, by what this rank steps, which code may read and write inside of this context."""
    state = optimizer.state
    if type(state) is not ClosedState:
        yield state
        return
    become(state, StateOfParts)
    try:
        yield state
    finally:
        become(state, ClosedState)


class SteppedElsewhere(StandIn, nn.Parameter):
    """A parameter that another rank steps now, so that what this rank writes into it would be lost."""

    MESSAGE = (
        "while an optimizer steps that needs whole parameters, each rank has some of them whole, in "
        "optimizer.param_groups, and this one is on another rank. In a hook of the step, use the parameters of "
        "optimizer.param_groups, each by itself; or do this in the loop, before or after optimizer.step()"
    )


class OwnedParameter:
    """Gives a model's parameter the values and the gradient of the whole one, which this rank steps.

    Optimizers and hooks may know the parameter by its identity. The whole one is stepped itself where the parameter is
    of a class that cannot have other values, such as a traced or a quantised one.

    Args:
        parameter: the model's parameter.
        whole: the whole parameter, with its gradient.
    """

    def __init__(self, parameter: nn.Parameter, whole: nn.Parameter):
        self.whole, self._kind = whole, type(parameter)
        self.stepped = parameter if _is_ours(self._kind) else whole
        # An assignment of another dtype or device to .data makes torch drop the node that hooks of the program know.
        self._swaps = (whole.dtype, whole.device) != (parameter.dtype, parameter.device)
        self._data: Tensor = parameter.data
        self._gradient = parameter.grad
        if self.stepped is not parameter:
            return
        become(parameter, nn.Parameter)
        if self._swaps:
            torch._C._swap_tensor_impl(parameter, whole)
        else:
            parameter.grad = None
            parameter.data = whole.data
            parameter.grad = whole.grad
            whole.grad = None

    def give_back(self) -> None:
        """Give the whole parameter what was made of its values, and the model's parameter what it had."""
        if self.stepped is self.whole:
            return
        if self._swaps:
            torch._C._swap_tensor_impl(self.stepped, self.whole)
            self.whole.grad = None
        else:
            self.whole.data, self.stepped.grad = self.stepped.data, None
            self.stepped.data = self._data
            self.stepped.grad = self._gradient
        become(self.stepped, self._kind)


class LentParameter:
    """Makes a parameter that another rank steps raise if it is read or written."""

    def __init__(self, parameter: nn.Parameter):
        self._parameter, self._kind = parameter, type(parameter)
        if _is_ours(self._kind):
            become(parameter, SteppedElsewhere)

    def give_back(self) -> None:
        """Give the parameter its class again."""
        if type(self._parameter) is SteppedElsewhere:
            become(self._parameter, self._kind)


def _is_ours(kind: type) -> bool:
    """Return whether a parameter's class is torch's own, or one that the runtime has given to it."""
    return kind is nn.Parameter or issubclass(kind, StandIn)
