"""flash_attn's functions in plain operations, so that transformers' flash attention runs on a CPU, in any dtype.

``installed`` puts them in the place of the packages. They have the names, arguments and shapes of flash_attn 2
(``flash_attn``), and of flash_attn 3 with sinks (``flash_attn_interface``).
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Window = tuple[int, int]
WITHOUT: Window = (-1, -1)


def hidden_pairs(queries: int, keys: int, causal: bool, window: Window) -> Tensor:
    """Which pairs do not count. The last query is at the place of the last key, as in flash_attn since 2.1."""
    left, right = window if not causal else (window[0], 0)
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return hidden


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """The scores ``[B, heads, queries, keys]``, and the slope of the soft cap."""
    assert q.shape[-1] == k.shape[-1] and q.stride(-1) == k.stride(-1) == 1 and q.dtype == k.dtype
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores, slope = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale, None
    if softcap:
        capped = (scores / softcap).tanh()
        scores, slope = softcap * capped, 1 - capped**2
    return scores.masked_fill(hidden, -torch.inf), slope


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: Window, softcap: float
) -> tuple[Tensor, Tensor]:
    assert k.shape == v.shape and k.dtype == v.dtype
    scores, _ = _scores(q, k, scale, softcap, hidden_pairs(q.shape[1], k.shape[1], causal, window))
    sums = scores.logsumexp(-1)
    probabilities = (scores - sums.masked_fill(sums == -torch.inf, 0)[..., None]).exp()
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v), sums


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:
    assert not dropout_p and alibi_slopes is None and not return_softmax
    window = window_size_left, window_size_right
    return *_forward(q, k, v, softmax_scale, causal, window, softcap), None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write the gradients, by the logarithms that are given: those of all keys, though these may be some."""
    assert not dropout_p and alibi_slopes is None and softmax_lse.is_contiguous()
    assert softmax_lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and dout.shape == out.shape == q.shape
    hidden = hidden_pairs(q.shape[1], k.shape[1], causal, (window_size_left, window_size_right))
    scores, slope = _scores(q, k, softmax_scale, softcap, hidden)
    probabilities = (scores - softmax_lse[..., None]).exp()
    groups = q.shape[2] // k.shape[2]
    delta = torch.einsum("bqhd,bqhd->bhq", dout, out)
    d_scores = torch.einsum("bqhd,bkhd->bhqk", dout, v.repeat_interleave(groups, 2)) - delta[..., None]
    d_scores = d_scores * probabilities * softmax_scale
    if slope is not None:
        d_scores = d_scores * slope
    if dq is not None:
        dq.copy_(torch.einsum("bhqk,bkhd->bqhd", d_scores, k.repeat_interleave(groups, 2)))
    if dk is not None:
        dk.copy_(torch.einsum("bhqk,bqhd->bkhd", d_scores, q).unflatten(2, (-1, groups)).sum(3))
    if dv is not None:
        dv.copy_(torch.einsum("bhqk,bqhd->bkhd", probabilities, dout).unflatten(2, (-1, groups)).sum(3))
    return delta


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = WITHOUT,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    assert alibi_slopes is None and not return_attn_probs
    assert not dropout_p, "the kernel's own random numbers have no counterpart in plain operations"
    return _attention(q, k, v, softmax_scale, causal, window_size, softcap)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = WITHOUT,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    assert not dropout_p and alibi_slopes is None and block_table is None
    spans = _spans(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return torch.cat([_attention(q[a], k[b], v[b], softmax_scale, causal, window_size, softcap)[0] for a, b in spans])


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window: Window,
    softcap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    output, sums = _forward(q, k, v, scale, causal, window, softcap)
    if sinks is not None:
        output = output * torch.sigmoid(sums - sinks[:, None]).transpose(1, 2)[..., None]
    return output


def _spans(
    q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int | Tensor, max_k: int | Tensor
) -> list[tuple[Any, Any]]:
    """The tokens of each document, by which queries and keys are indexed, as a batch of one row."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and int(cu_q[-1]) == len(q) and int(cu_k[-1]) == len(k)
    assert int(cu_q.diff().max()) <= int(max_q) and int(cu_k.diff().max()) <= int(max_k)
    pairs = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
    return [((None, slice(*of_q)), (None, slice(*of_k))) for of_q, of_k in pairs]


class Three:
    """The functions of flash_attn 3, of the builds that take sinks."""

    @staticmethod
    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = WITHOUT,
        softcap: float = 0.0,
        deterministic: bool = False,
        s_aux: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        return _attention(q, k, v, softmax_scale, causal, window_size, softcap, s_aux), None

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int | Tensor,
        max_seqlen_k: int | Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = WITHOUT,
        softcap: float = 0.0,
        deterministic: bool = False,
        s_aux: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        spans = _spans(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        options = softmax_scale, causal, window_size, softcap, s_aux
        return torch.cat([_attention(q[a], k[b], v[b], *options)[0] for a, b in spans]), None

    @staticmethod
    def _flash_attn_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_new: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = WITHOUT,
        softcap: float = 0.0,
        num_splits: int = 1,
    ) -> tuple[Tensor, Tensor]:
        assert softmax_scale is not None
        return _forward(q, k, v, softmax_scale, causal, window_size, softcap)

    @staticmethod
    def _flash_attn_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: Window = WITHOUT,
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> None:
        settings = softmax_scale, causal, *window_size, softcap
        _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, 0.0, *settings, None, deterministic)


def _module(name: str, **contents: Any) -> ModuleType:
    """A package whose functions say that they are of it, since others are looked for beside them."""
    module = ModuleType(name)
    vars(module).update(contents)
    for function in filter(inspect.isfunction, contents.values()):
        function.__module__ = name if not name.endswith("padding") else function.__module__
    return module


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install the functions as the packages, whichever flash attention transformers has loaded."""
    from transformers import modeling_flash_attention_utils as stock

    two = (flash_attn_func, flash_attn_varlen_func, _flash_attn_forward, _flash_attn_backward)
    packages = {
        "flash_attn": _module("flash_attn", flash_attn_with_kvcache=None, **{f.__name__: f for f in two}),
        "flash_attn.bert_padding": _module(
            "flash_attn.bert_padding", pad_input=stock._pad_input, unpad_input=stock._unpad_input
        ),
    }
    three = {f.__name__: getattr(Three, f.__name__) for f in two}
    packages["flash_attn_interface"] = _module("flash_attn_interface", flash_attn_with_kvcache=None, **three)
    with (
        mock.patch.dict(sys.modules, packages),
        mock.patch.object(stock, "is_flash_attn_2_available", lambda: True),
        mock.patch.object(stock, "_loaded_implementation", None),
    ):
        yield


def with_flash(model: Any, implementation: str = "flash_attention_2") -> Any:
    """Let a model call an attention by name, without transformers' check that this machine has a GPU."""
    for config in {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values():
        config._attn_implementation = implementation
    return model
