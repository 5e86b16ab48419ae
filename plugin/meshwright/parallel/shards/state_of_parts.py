"""The state of an optimizer of which each rank has a part: its steps find it, and the program gets an error.

The keys of such a state may be tensors that the program does not know, so a parameter would seem to have no state.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from meshwright.errors import UnreadableTensorError
from meshwright.parallel.shards.stand_in import become


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
