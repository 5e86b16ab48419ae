"""Attention by the flash attention package that a model names, over the ranks of cp.

On ranks that have all tokens of some heads, the package's own function runs. Where queries meet the keys of other
ranks, its kernels for blocks run, whose results are merged as those of torch's kernels are.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.context.attend import AttentionCall
from meshwright.context.flash import FlashCall, flash_attention, is_right
from meshwright.context.flash_package import PackageKernel
from meshwright.context.key_exchange import KeyExchange
from meshwright.errors import PlanError
from meshwright.parallel.batch.flash_rows import borders_at
from meshwright.parallel.batch.schema import BORDERS
from meshwright.parallel.sequence_parts import TokenRun


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
