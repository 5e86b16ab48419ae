"""Flash attention over keys that other ranks hold, by torch's kernels or by those of a package that transformers has
loaded.

Each block runs in one kernel, without a mask. The kernel also gives the logarithm of the sum of exponentials of each
query's scores, by which the results of blocks are merged. In backward a block's kernel is given the result and the
logarithm over all keys, so that it finds the gradients of the whole attention without running forward again.

They are found beside the function that transformers calls, so every package with flash_attn's functions will do:
flash_attn 2 and 3, and kernels of the hub. A value is given to each argument by its name, since versions differ in
their order.

On ranks that have all tokens of some heads, the package's own function runs. Where queries meet the keys of other
ranks, its kernels for blocks run, whose results are merged as those of torch's kernels are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.autograd import TensorFunction
from meshwright.context.attend import AttentionCall
from meshwright.context.key_exchange import KeyExchange, WholeKeys
from meshwright.context.masks import CausalBlock, Documents, causal_blocks
from meshwright.errors import PlanError
from meshwright.parallel.batch.flash_rows import borders_at, flash_function
from meshwright.parallel.batch.schema import BORDERS
from meshwright.parallel.draws.kernels import apart
from meshwright.parallel.sequence_parts import TokenRun

_WIDEST = 256  # channels of a head, on CUDA
_ALIGNED = 8


class FlashKernel(Protocol):
    """Runs a block of attention, on queries, keys and values ``[B, heads, tokens, d]``."""

    def forward(self, call: FlashCall, block: CausalBlock, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return a block's result, and the logarithms of its sums, ``[B, heads, queries]``."""

    def backward(
        self, call: FlashCall, block: CausalBlock, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of a block's queries, keys and values, given ``g`` and the results over all keys."""


class TorchKernel:
    """Runs blocks by torch's own kernels, without a window or soft cap."""

    def forward(self, call: FlashCall, block: CausalBlock, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert block.window is None and not call.softcap
        run = torch.ops.aten._scaled_dot_product_flash_attention
        if q.device.type == "cpu":
            run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        found = run(q, k, v, 0.0, block.is_causal, scale=call.scale)
        return found[0], found[1]

    def backward(
        self, call: FlashCall, block: CausalBlock, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums, is_causal, scale = sums.contiguous(), block.is_causal, call.scale
        if q.device.type == "cpu":
            d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, out, sums, 0.0, is_causal, scale=scale
            )
            return d_q, d_k, d_v
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # in place of dropout's random state
        d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            g, q, k, v, out, sums, None, None, q.shape[2], k.shape[2], 0.0, is_causal, unused, unused, scale=scale
        )
        return d_q, d_k, d_v


TORCH = TorchKernel()


@dataclass(frozen=True, kw_only=True)
class FlashCall:
    """One attention, with everything but queries, keys and values.

    Args:
        keys: how this rank's queries meet all keys.
        runs: where this rank's queries lie in the sequence.
        documents: where the documents of each row start.
        scale: the factor of the scores.
        kernel: what runs a block.
        window: the number of tokens to which a query attends at most, itself included; None for all. Only the kernels
            of a package take one.
        softcap: the bound of the scores; 0 for none. Only the kernels of a package take one.
    """

    keys: KeyExchange
    runs: tuple[TokenRun, ...]
    documents: Documents
    scale: float
    kernel: FlashKernel = TORCH
    window: int | None = None
    softcap: float = 0.0

    def blocks(self, keys: tuple[TokenRun, ...]) -> list[CausalBlock]:
        """Return the blocks that this rank's queries share with keys of some runs."""
        return _blocks(self.documents, self.runs, keys, self.window)


_blocks = functools.lru_cache(maxsize=64)(causal_blocks)  # all layers of a pass have the same blocks


def flash_attention(call: FlashCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Return the attention of this rank's queries over the whole sequence, ``[B, queries, heads, d]``.

    Args:
        call: the attention.
        q: this rank's queries, ``[B, heads, queries, d]``.
        k: its keys, ``[B, key heads, keys, d]``.
        v: its values.
        sinks: a score for each head that takes a part of each query's attention, to no value.
    """
    result: Tensor = _Flash.apply(call, q, k, v, sinks)
    return result


def has_flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the device has kernels for these tensors that give the results of plain operations.

    Each rank asks for itself. Ranks with different answers still make the same collectives: with and without the
    kernels, attention brings keys and gradients by the same :class:`KeyExchange`, in the same order and dtypes.
    """
    device, dtype, width = q.device, q.dtype, q.shape[-1]
    if not (k.dtype == v.dtype == dtype and k.shape[-1] == v.shape[-1] == width):
        return False
    if device.type == "cuda":
        half = dtype in (torch.float16, torch.bfloat16)
        return half and width % _ALIGNED == 0 and width <= _WIDEST and is_right(device, dtype, TORCH)
    return device.type == "cpu" and is_right(device, dtype, TORCH)


class _Flash(TensorFunction):
    @staticmethod
    def forward(ctx: Any, call: FlashCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        rows, heads, length, width = q.shape
        # A token's heads are adjacent in memory, so that the output projection reads the tensor that backward keeps.
        output = torch.empty(rows, length, heads, width, dtype=dtype, device=q.device).transpose(1, 2)
        total = torch.empty(rows, heads, length, dtype=dtype, device=q.device)
        for runs, keys, values in call.keys.round(k, v):
            for block in call.blocks(runs):
                own = block.rows, slice(None), block.queries
                at = block.rows, slice(None), block.keys
                new, sums = call.kernel.forward(call, block, q[own], keys[at], values[at])
                sums = sums.to(dtype)
                if not block.is_causal:  # for its queries, a causal block comes first
                    before = total[own]
                    share = torch.sigmoid(sums - before)[..., None]
                    new = output[own].lerp(new.to(dtype), share)
                    sums = torch.logaddexp(before, sums)
                output[own], total[own] = new, sums
        if sinks is not None:
            added = sinks.to(dtype)[:, None]
            output *= torch.sigmoid(total - added)[..., None]
            total = torch.logaddexp(total, added)
        result = output.to(q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, k, v, sinks, result, total)
        return result.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        call = ctx.call
        q, k, v, sinks, output, total = ctx.saved_tensors
        grad, dtype = grad.transpose(1, 2), total.dtype
        d_q = torch.empty_like(q, dtype=dtype)
        sums = call.keys.gradients(k, v, dtype)
        for runs, keys, values in call.keys.round(k, v):
            d_k, d_v = sums.of_block()
            for block in call.blocks(runs):
                own = block.rows, slice(None), block.queries
                at = block.rows, slice(None), block.keys
                found = call.kernel.backward(
                    call, block, grad[own], q[own], keys[at], values[at], output[own], total[own]
                )
                if block.is_causal:
                    d_q[own] = found[0]
                else:
                    d_q[own] += found[0]
                d_k[at] += found[1]
                d_v[at] += found[2]
            sums.pass_on()
        d_k, d_v = sums.own()
        d_sinks = None
        if sinks is not None:
            share = (sinks.to(dtype)[:, None] - total).exp()
            d_sinks = -(share * (grad.to(dtype) * output.to(dtype)).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return None, d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_sinks


@functools.cache
@torch.compiler.disable  # type: ignore[untyped-decorator]
def is_right(device: torch.device, dtype: torch.dtype, kernel: FlashKernel) -> bool:
    """Return whether kernels give the results of plain operations on a device, on blocks of random values."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return True  # a trace for a GPU that this machine lacks
    own_tensors = torch.autograd.graph.saved_tensors_hooks(_same, _same)  # checkpointing counts what its layer saves
    outside_of_the_pass = _disable_current_modes(), torch.inference_mode(False), torch.enable_grad(), own_tensors
    with contextlib.ExitStack() as stack:
        for context in (apart(), *outside_of_the_pass, torch.autocast(device.type, enabled=False)):
            stack.enter_context(context)
        try:
            return _equals_plain_operations(device, dtype, kernel)
        except (RuntimeError, AttributeError, TypeError):  # this version of torch has no such kernel
            return False


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _equals_plain_operations(device: torch.device, dtype: torch.dtype, kernel: FlashKernel) -> bool:
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 4, 32, 8), (1, 2, 32, 8), (1, 2, 32, 8), (1, 32, 4, 8)
    q, k, v, grad = (torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for size in sizes)
    runs = TokenRun(0, 16), TokenRun(16, 16)
    window, cap = (None, 0.0) if kernel is TORCH else (20, 2.0)
    keys = WholeKeys(None)
    call = FlashCall(keys=keys, runs=runs, documents=((0,),), scale=0.4, kernel=kernel, window=window, softcap=cap)
    output = flash_attention(call, q, k, v)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    key, value = (x.repeat_interleave(2, 1) for x in wide[1:])
    seen = torch.ones(32, 32, dtype=torch.bool, device=device).tril()
    scores = 0.4 * wide[0] @ key.transpose(-1, -2)
    if window is not None:
        seen, scores = seen.triu(1 - window), cap * (scores / cap).tanh()
    expected = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2)
    found = (output, *torch.autograd.grad(output, (q, k, v), grad))
    wanted = (expected, *torch.autograd.grad(expected, wide, grad.float()))
    # The values are about 1, and the tolerance is that of float32, or of 8 bits of precision.
    tolerance = 1e-4 if dtype.itemsize > 2 else 5e-2
    pairs = zip(found, wanted, strict=True)
    return all(torch.allclose(x.float(), y, atol=tolerance, rtol=tolerance) for x, y in pairs)


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


def in_kernel_dtype(call: AttentionCall, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast queries, keys and values as transformers casts them for a package."""
    stock = sys.modules["transformers.integrations.flash_attention"]
    dtype = stock.get_target_dtype(tensors[0], call.module)
    return tensors if dtype is None else tuple(x.to(dtype) for x in tensors)


def over_whole_rows(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention by the package's own function, ``[B, tokens, heads, d]``, for all tokens of some heads."""
    mask, length = call.mask, q.shape[2]
    documents = mask.documents_of_kernel(_borders(call))
    call = dataclasses.replace(call, options={name: x for name, x in call.options.items() if name not in BORDERS})
    if mask.holes is not None:
        return call.run(q, k, v, F.pad(~mask.holes, (0, length - mask.length)), is_causal=True)
    if documents == ((0,),):
        return call.run(q, k, v, None, is_causal=True)
    of_rows = documents * len(q) if len(documents) == 1 else documents
    starts = [row * length + start for row, own in enumerate(of_rows) for start in own]
    return call.run(q, k, v, None, is_causal=True, **borders_at([*starts, len(q) * length], q.device))


def over_keys(
    call: AttentionCall, runs: tuple[TokenRun, ...], keys: KeyExchange, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Return the attention of this rank's queries over the keys of all ranks, ``[B, queries, heads, d]``.

    Args:
        call: the attention.
        runs: where this rank's queries lie in the sequence.
        keys: how they meet all keys.
        q: this rank's queries, ``[B, heads, queries, d]``.
        k: its keys, ``[B, key heads, keys, d]``.
        v: its values.
    """
    implementation, width, options = call.implementation, v.shape[-1], call.options
    kernel = PackageKernel(implementation)
    if not is_right(q.device, q.dtype, kernel):
        raise PlanError(
            f"the kernels of attn_implementation={implementation!r} fail for blocks of {q.dtype} on {q.device.type}, "
            "or give other numbers than plain operations. Use ParallelPlan(context='ulysses'), which calls the "
            "package as a whole, or load the model with attn_implementation='sdpa'"
        )
    flash = FlashCall(
        keys=keys,
        runs=runs,
        documents=call.mask.documents_of_kernel(_borders(call)),
        scale=call.scale(q.shape[-1]),
        kernel=kernel,
        window=options.get("sliding_window"),
        softcap=options.get("softcap") or 0.0,
    )
    v = F.pad(v, (0, q.shape[-1] - width))  # kernels take values as wide as keys
    output = flash_attention(flash, q, k, v, options.get("s_aux"))[..., :width]
    return output if call.mask.holes is None else output.masked_fill(_own(call.mask.holes, runs), 0)


def _borders(call: AttentionCall) -> Tensor | None:
    borders: Tensor | None = call.options.get("cu_seq_lens_q")
    return borders


def _own(holes: Tensor, runs: tuple[TokenRun, ...]) -> Tensor:
    """Return which of this rank's queries are padding of the batch, ``[B, queries, 1, 1]``."""
    last = holes.shape[1] - 1
    places = [torch.arange(run.start, run.stop, device=holes.device).clamp(max=last) for run in runs]
    return holes[:, torch.cat(places), None, None]
