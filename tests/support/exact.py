"""float64 all the way: models cast to float32 inside norms, softmax and loss, which hides errors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Turns every cast of a float64 tensor to float32 into no cast."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        if func is Tensor.backward:  # recomputation runs inside it, where the mode would be off
            with self:
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the expected tensor's largest value."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    scale = expected.abs().max().item() or 1.0
    return (actual.to(expected.dtype) - expected).abs().max().item() / scale
