"""Keeps models in float64, since their casts to float32 inside norms, softmax and loss would hide errors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from meshwright.roles.blocks.experts import is_experts

_IN_FLOAT64 = ("eager", "batched_mm")  # transformers' code of experts that does not need torch's grouped_mm


def _keep_float64(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def keep(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        if x.dtype is torch.float64:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return function(x, *args, **kwargs)

    return keep


def _as_written(obj: Any, *_: object, **__: object) -> Any:
    return obj


class Float64:
    """A context in which a cast of a float64 tensor to float32 returns float64.

    The class patches functions, since a TorchFunctionMode is off while activation checkpointing recomputes.
    """

    def __enter__(self) -> None:
        to_float = Tensor.float

        def to_float_or_double(x: Tensor) -> Tensor:
            if x.dtype is torch.float64:
                return x
            # Integers become float64, since transformers before 5.18 multiplies cast positions by a float64 matrix.
            return to_float(x) if x.is_floating_point() else x.double()

        self._patches: list[mock._patch[Any]] = [
            mock.patch.object(Tensor, "float", to_float_or_double),
            mock.patch.object(Tensor, "to", _keep_float64(Tensor.to)),
            mock.patch.object(Tensor, "type", _keep_float64(Tensor.type)),
            mock.patch.object(torch, "zeros_like", _keep_float64(torch.zeros_like)),
            mock.patch.object(torch, "sum", _keep_float64(torch.sum)),
            mock.patch.object(torch.nn.functional, "softmax", _keep_float64(torch.nn.functional.softmax)),
            mock.patch.object(torch.nn.functional, "log_softmax", _keep_float64(torch.nn.functional.log_softmax)),
            # What a family's file compiles as it is imported runs as written: TorchScript knows none of the above.
            mock.patch.object(torch.jit, "script", _as_written),
        ]
        for patch in self._patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Use float64 wherever a model would choose float32 itself."""
    before, zeros = torch.get_default_dtype(), torch.zeros

    def zeros_in_float64(*size: Any, **options: Any) -> Tensor:
        return zeros(*size, **options | ({"dtype": torch.float64} if options.get("dtype") is torch.float32 else {}))

    torch.set_default_dtype(torch.float64)
    try:
        with Float64(), mock.patch.object(torch, "zeros", zeros_in_float64):
            yield
    finally:
        torch.set_default_dtype(before)


def run_experts_in_float64(model: nn.Module) -> tuple[str, ...]:
    """Let a model's experts run code that can compute in float64; return a sentence if they would not have.

    Their default is torch's grouped matrix multiplication, which has no float64 on a CPU.
    """
    found: list[Any] = [module.config for module in model.modules() if is_experts(module)]
    configs = {id(config): config for config in found}
    others = {config._experts_implementation for config in configs.values()}.difference(_IN_FLOAT64)
    if not others:
        return ()
    for config in configs.values():
        config._experts_implementation = _IN_FLOAT64[0]
    return (
        f"The experts run experts_implementation={_IN_FLOAT64[0]!r} in place of {', '.join(map(repr, others))}, which "
        "has no float64.",
    )
