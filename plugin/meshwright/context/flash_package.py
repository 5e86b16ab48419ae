"""The kernels of a flash attention package, which transformers has loaded, for one block of attention at a time.

They are found beside the function that transformers calls, so every package with flash_attn's functions will do:
flash_attn 2 and 3, and kernels of the hub. A value is given to each argument by its name, since versions differ in
their order.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.context.causal_blocks import CausalBlock
from meshwright.context.flash import FlashCall
from meshwright.errors import PlanError
from meshwright.parallel.batch.flash_rows import flash_function

_ALIGNED = 8  # channels of a head, which flash_attn's own functions round up to


def takes_sinks(implementation: str) -> bool:
    """Return whether an implementation's function has an argument for sinks, without which it leaves them out."""
    parameters = inspect.signature(flash_function(implementation)).parameters
    return not {"s_aux", "learnable_sink"}.isdisjoint(parameters)


@dataclass(frozen=True)
class PackageKernel:
    """Runs blocks of attention by a package's functions.

    Args:
        implementation: the name by which transformers loads the package.
    """

    implementation: str

    def forward(self, call: FlashCall, block: CausalBlock, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return a block's result, and the logarithms of its sums; see :class:`FlashKernel`."""
        forward, _ = functions_for_blocks(self.implementation)
        width = q.shape[-1]
        given = dict(zip("qkv", map(_tokens_first, (q, k, v)), strict=True))
        output, sums, *_ = forward(**forward.bound(_settings(call, block) | given))
        return output[..., :width].transpose(1, 2), sums

    def backward(
        self, call: FlashCall, block: CausalBlock, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of a block; see :class:`FlashKernel`."""
        _, backward = functions_for_blocks(self.implementation)
        width = q.shape[-1]
        names = ("dout", "q", "k", "v", "out")
        given = dict(zip(names, map(_tokens_first, (g, q, k, v, out)), strict=True))
        results = {f"d{name}": torch.empty_like(given[name], memory_format=torch.contiguous_format) for name in "qkv"}
        given |= results | {"softmax_lse": sums.contiguous()}
        backward(**backward.bound(_settings(call, block) | given))
        d_q, d_k, d_v = (results[name][..., :width].transpose(1, 2) for name in ("dq", "dk", "dv"))
        return d_q, d_k, d_v


def _tokens_first(x: Tensor) -> Tensor:
    """Return ``[B, heads, tokens, d]`` as ``[B, tokens, heads, d]``, with a number of channels that kernels take."""
    x = x.transpose(1, 2)
    if missing := -x.shape[-1] % _ALIGNED:
        x = F.pad(x, (0, missing))
    return x if x.stride(-1) == 1 else x.contiguous()


def _settings(call: FlashCall, block: CausalBlock) -> dict[str, Any]:
    left, right = (-1, -1) if block.window is None else (block.window, 0 if block.is_causal else -1)
    return {
        "softmax_scale": call.scale,
        "causal": block.is_causal,
        "window_size_left": left,
        "window_size_right": right,
        "window_size": (left, right),
        "softcap": call.softcap,
        "dropout_p": 0.0,
        "return_softmax": False,
        "deterministic": os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1",
    }


@dataclass(frozen=True)
class _Function:
    """A function of the package, and the names of its arguments with their defaults."""

    call: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]

    @classmethod
    def of(cls, call: Callable[..., Any]) -> _Function:
        # A custom operator of torch has the signature of the function that it was made of.
        return cls(call, inspect.signature(getattr(call, "_init_fn", call)).parameters)

    def __call__(self, **arguments: Any) -> Any:
        return self.call(**arguments)

    def bound(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a value for each argument that has one here, and None for others without a default."""
        return {
            name: given.get(name)
            for name, parameter in self.parameters.items()
            if name in given or parameter.default is parameter.empty
        }


_BOUNDARY = {"q", "k", "v", "softmax_scale", "causal"}


def functions_for_blocks(implementation: str) -> tuple[_Function, _Function]:
    """Return a package's functions for blocks, forward and backward.

    Raises:
        PlanError: if the package lacks them.
    """
    return _beside(flash_function(implementation), implementation)


@functools.cache
def _beside(function: Callable[..., Tensor], implementation: str) -> tuple[_Function, _Function]:
    """Return the functions for blocks, forward and backward, of the module that has a package's function."""
    home = sys.modules.get(function.__module__)
    found = [getattr(home, name, None) for name in ("_flash_attn_forward", "_flash_attn_backward")]
    functions = [_Function.of(call) for call in found if call is not None]
    needed = (_BOUNDARY, _BOUNDARY | {"dout", "out", "softmax_lse", "dq", "dk", "dv"})
    if len(functions) < 2 or any(names - f.parameters.keys() for names, f in zip(needed, functions, strict=True)):
        raise PlanError(
            f"the package of attn_implementation={implementation!r} has no functions _flash_attn_forward and "
            "_flash_attn_backward as flash_attn 2 and 3 have, which give the logarithms by which blocks are merged. "
            "Use ParallelPlan(context='ulysses'), which calls the package as a whole, or load the model with "
            "attn_implementation='sdpa'"
        )
    return functions[0], functions[1]
