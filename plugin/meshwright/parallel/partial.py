"""Whole parameters of whose gradient each rank of tp computes a part: norms under sequence parallelism, and biases.

The runtime adds the parts up over tp. What the program computes from such a parameter outside of the model, a penalty
on weights for example, gives every rank the same gradient, which would be counted once for each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from meshwright.parallel.graph import scale_gradient
from meshwright.parallel.sharded import METADATA, become, in_backward
from meshwright.parallel.unreadable import reading_shards, record_if_any


class PartialParameter(nn.Parameter):
    """Its gradient by way of the program's own operations is divided by the number of ranks that add it up."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with reading_shards():
            if torch.is_grad_enabled() and not in_backward() and _reads_values(func):
                args, kwargs = _divided(args), _divided(kwargs)
            return func(*args, **kwargs)


class ModelWindow:
    """Partial parameters are plain ones while the model runs, or a module of it that is called alone.

    Args:
        parameters: of the model.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = list(parameters)
        self._depth = 0
        self.close()

    def over(self, module: nn.Module) -> None:
        """Open it while a module runs."""
        module.register_forward_pre_hook(self.open, prepend=True)
        module.register_forward_hook(self.close, always_call=True)

    def open(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._become(PartialParameter, nn.Parameter)

    def close(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._become(nn.Parameter, PartialParameter)

    def _become(self, old: type, new: type) -> None:
        for parameter in self.parameters:
            if type(parameter) is old:  # quantised and fake ones have a class of their own
                become(parameter, new)


# They take a parameter for what it is.
_IDENTITY = frozenset(("__repr__", "__deepcopy__", "__reduce_ex__", "detach", "grad", "backward"))


def _reads_values(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return func.__self__.__name__ in ("T", "mT", "H", "mH")  # type: ignore[attr-defined]
    return name not in METADATA and name not in _IDENTITY


def _divided(x: Any) -> Any:
    """What a program computes with, in the place of partial parameters."""
    if isinstance(x, PartialParameter) and x.requires_grad and (record := record_if_any(x)) is not None:
        return scale_gradient(x, 1 / len(record.layout.spans))
    if isinstance(x, dict):
        return {key: _divided(value) for key, value in x.items()}
    return type(x)(map(_divided, x)) if type(x) in (list, tuple) else x
