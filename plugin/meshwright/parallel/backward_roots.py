"""Shows the losses of each backward pass to observers. torch has no hook there, so its function is wrapped once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from meshwright.parallel.autograd_graph import in_backward


class RootObserver(Protocol):
    """The interface of an observer."""

    def of_losses(self, losses: Sequence[object]) -> None:
        """See the losses of a backward pass that is about to begin."""


_observers: weakref.WeakSet[RootObserver] = weakref.WeakSet()


def show_roots_to(observer: RootObserver) -> None:
    """Show the losses of each later backward pass to an observer, for as long as it lives."""
    _observers.add(observer)
    _wrap()


@functools.cache
def _wrap() -> None:
    backward: Any = torch.autograd.backward  # which Tensor.backward calls by this name

    @functools.wraps(backward)
    def shown(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not in_backward():  # a pass inside of another one is of a part of the graph
            losses = tensors if isinstance(tensors, list | tuple) else [tensors]
            for observer in tuple(_observers):
                observer.of_losses(losses)
        backward(tensors, *args, **kwargs)

    torch.autograd.backward = shown
