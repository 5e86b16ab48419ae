"""Hands each random operation of torch to a function, which may draw another tensor in its place.

torch's dispatcher runs a Python function in the place of the kernels of a few operations, those that fill a tensor with
random numbers. All others of torch draw by these: dropout, ``torch.rand``, noise and masks alike. So a program that
draws nothing runs nothing of this file, and needs no mode that sees all of its operations.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Generator, Tensor

from meshwright.temporarily import temporarily

# Each fills its first argument, elementwise; randperm fills its argument ``out``.
_FILLING = (
    "bernoulli_.float", "bernoulli_.Tensor", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_",
    "random_", "random_.from", "random_.to", "randperm.generator_out", "uniform_",
)  # fmt: skip
_DROPOUT = "native_dropout"  # returns the product with a mask, and the mask

Call = Callable[..., Any]  # an operation's own kernel
Handler = Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]


_inside = threading.local()  # whether this thread runs the handler, whose own draws are torch's


class _DrawKernels:
    """What runs in the place of this process's kernels."""

    def __init__(self) -> None:
        self.handler: Handler | None = None
        self.libraries: dict[str, torch.library.Library] = {}


_process = _DrawKernels()


def hand_draws_to(handler: Handler, devices: Iterable[torch.device]) -> None:
    """Let a function make all draws of this process on some kinds of devices from now on.

    Args:
        handler: the function, which gets the operation's own kernel and its arguments. Draws that the function makes
            itself are torch's.
        devices: the kinds of devices.
    """
    _process.handler = handler
    for key in {device.type.upper() for device in devices} & {"CPU", "CUDA"} - _process.libraries.keys():
        library = _process.libraries[key] = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a kernel in the place of its own
            for name in (*_FILLING, _DROPOUT):
                if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                    continue  # torch is built for CPUs, and a step is traced
                kernel = torch.library.get_kernel(f"aten::{name}", key)
                draw = functools.partial(_dropout if name == _DROPOUT else _draw, kernel.call_boxed)
                library.impl(name, draw, key, with_keyset=True, allow_override=True)


def _draw(kernel: Call, keys: Any, *args: Any, **kwargs: Any) -> Any:
    if (handler := _process.handler) is None or vars(_inside):
        return kernel(keys, *args, **kwargs)
    with apart():
        return handler(functools.partial(kernel, keys), args, kwargs)


def _dropout(kernel: Call, keys: Any, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Draw the mask as a tensor that is filled, and multiply as the kernel does."""
    if (handler := _process.handler) is None or vars(_inside) or not train or p in (0, 1):
        result: tuple[Tensor, Tensor] = kernel(keys, x, p, train)
        return result

    def fill(mask: Tensor) -> Tensor:
        # The kernel draws alike for all values and, on CUDA, for any dtype of the same size.
        return mask.copy_(kernel(keys, torch.empty_like(mask, dtype=x.dtype), p, train)[1])

    with apart():
        mask = handler(fill, (torch.empty_like(x, dtype=torch.bool),), {})
        return torch.ops.aten.native_dropout_backward(x, mask, 1 / (1 - p)), mask


def apart() -> contextlib.AbstractContextManager[None]:
    """Let what this thread draws inside the context be torch's, as without a handler."""
    return temporarily(_inside, is_on=True)


def generators_of(device: torch.device) -> dict[str, Generator]:
    """Return torch's own generators of the CPU and of a device, by the device's kind."""
    found = {"cpu": torch.default_generator}
    if device.type == "cuda" and torch.cuda.default_generators:  # not while a step is traced without a GPU
        index = torch.cuda.current_device() if device.index is None else device.index
        found["cuda"] = torch.cuda.default_generators[index]
    return found


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator:
    """Return the generator from which an operation draws."""
    given: Generator | None = kwargs.get("generator")
    device = kwargs.get("out", args[0]).device
    own = generators_of(device)[device.type]
    return own if given is None or identity_of(given) == identity_of(own) else given


def is_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation draws from a generator of the program's own."""
    given = kwargs.get("generator")
    return given is not None and generator_of(args, kwargs) is given


def identity_of(generator: Generator) -> int:
    """Return what a generator is known by: torch may hand a kernel another object for it."""
    number: int = generator._cdata  # type: ignore[attr-defined]
    return number


def advance(generator: Generator) -> None:
    """Draw one number, inside of :func:`apart`."""
    torch.empty((), device=generator.device).uniform_(generator=generator)


def digest_of(generator: Generator) -> bytes:
    """Return a digest of a generator's state."""
    return hashlib.blake2b(generator.get_state().numpy().data, digest_size=8).digest()
