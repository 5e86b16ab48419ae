"""Changes the gradient that one rank computes, before it is reduced, where a hook of a program sees the reduced one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def on_arrival(parameter: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Pass each gradient of a parameter that arrives on this rank through a function; return a handle."""
    # The parameter keeps the node, since torch makes a new one, without the hook, if nobody does.
    parameter.__dict__["arrival"] = node = get_gradient_edge(parameter).node
    return node.register_prehook(lambda grads: (change(grads[0]),))
