"""Ring attention: keys and values go round the ranks, and each rank adds up the attention of its own queries.

Each block's contribution is merged by the logarithm of its sum of exponentials. Forward keeps only this rank's tensors;
backward sends the keys and values round again. The gradients of each block go with them, and one hop further.

Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023; the recomputed probabilities are those of Dao et
al., "FlashAttention", 2022.

Shape suffixes: B batch, K key heads, G queries for each key head, Q queries of a block, T keys of a block, D channels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.autograd import TensorFunction
from meshwright.context.attend import AttentionCall, ReplayedDraws, as_autocast
from meshwright.context.key_exchange import RingKeys
from meshwright.context.masks import ContextMask, query_blocks
from meshwright.parallel.draws.passes import score_blocks
from meshwright.parallel.draws.score_blocks import ScoreBlock, ScoreBlocks
from meshwright.parallel.sequence_parts import TokenRun

_Places = tuple[TokenRun, TokenRun]


@dataclass(frozen=True, kw_only=True)
class RingCall:
    """One attention over the ring, with everything but queries, keys and values.

    Args:
        keys: the keys and values of the ring.
        mask: the mask.
        scale: the factor of the scores.
        softcap: the bound of the scores, if the model has one.
        dropout: the part of the probabilities that are dropped.
        heads: which of the ranks that share the heads of a rank of tp has those of the call, and the number of these
            ranks.
    """

    keys: RingKeys
    mask: ContextMask
    scale: float
    softcap: float | None = None
    dropout: float = 0.0
    heads: tuple[int, int] = (0, 1)

    @classmethod
    def of(cls, call: AttentionCall, keys: RingKeys, *, width: int) -> RingCall:
        """Return a call of a model's attention function as one over the ring; queries have ``width`` channels."""
        scale, softcap = call.scale(width), call.options.get("softcap")
        return cls(keys=keys, mask=call.mask, scale=scale, softcap=softcap, dropout=call.dropout, heads=call.heads)

    @property
    def runs(self) -> tuple[TokenRun, ...]:
        return self.keys.runs_of[self.keys.axis.rank]

    def blocks(self, runs: tuple[TokenRun, ...]) -> Iterator[tuple[slice, slice, _BlockMask, _Places]]:
        """Yield the blocks that keys of ``runs`` and this rank's queries share: queries, keys, the mask, and the places
        of both in the sequence.

        The keys are places among the tokens of ``runs``. A block without a visible pair is left out.
        """
        for place, queries in query_blocks(self.runs):
            low, high = self.mask.visible(queries)
            offset = 0
            for run in runs:
                start, stop = max(run.start, low), min(run.stop, high)
                if start < stop:
                    keys = slice(offset + start - run.start, offset + stop - run.start)
                    held = TokenRun(start, stop - start)
                    yield place, keys, self._mask(queries, held), (queries, held)
                offset += run.size

    def kept(self, scores: Tensor, dtype: torch.dtype, places: _Places, drawn: ScoreBlocks | None) -> Tensor | None:
        """Return the factors of a block's probabilities ``[B, K, G, Q, T]``, 0 where they are dropped; None for 1.

        Args:
            scores: the scores.
            dtype: the dtype of the probabilities.
            places: where the queries and the keys lie in the sequence.
            drawn: what draws for the blocks; None if each draws for itself.
        """
        if not self.dropout:
            return None
        queries, keys = places
        block = ScoreBlock((queries,), (keys,), self.heads)
        with contextlib.nullcontext() if drawn is None else drawn.at(block):
            ones = torch.ones_like(scores.flatten(1, 2), dtype=dtype)
            return F.dropout(ones, self.dropout).view(scores.shape)

    def _mask(self, queries: TokenRun, keys: TokenRun) -> _BlockMask:
        mask = self.mask
        window = mask.window is None or queries.stop - keys.start <= mask.window
        if mask.is_plain and keys.stop <= queries.start + 1 and window:
            return _BlockMask(None, None)  # every query of the block attends to every key
        hidden, blind = ~mask.block(queries, keys)[:, :, None], mask.blind(queries)
        if blind is None:
            return _BlockMask(hidden, None)
        blind = blind[:, :, None, :, None]
        return _BlockMask(hidden & ~blind, blind)


@dataclass(frozen=True)
class _BlockMask:
    """The mask of a block of scores ``[B, K, G, Q, T]``.

    Args:
        hidden: the scores that do not count; None if all do.
        blind: the queries whose scores are all equal; None if there are none.
    """

    hidden: Tensor | None
    blind: Tensor | None

    def on(self, scores: Tensor) -> Tensor:
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden, -torch.inf)
        return scores if self.blind is None else scores.masked_fill(self.blind, 0)


def ring_attention(call: RingCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Return the attention of this rank's queries over the whole sequence, ``[B, queries, heads, d]``.

    Args:
        call: the attention.
        q: this rank's queries, ``[B, heads, queries, d]``.
        k: its keys, ``[B, key heads, keys, d]``.
        v: its values.
        sinks: for each head, a score that takes its share of the probabilities and has no value, ``[heads]``.
    """
    q, k, v = (as_autocast(x) for x in (q, k, v))
    result: Tensor = _Ring.apply(call, q, k, v, sinks)
    return result


class _Ring(TensorFunction):
    @staticmethod
    def forward(ctx: Any, call: RingCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        grouped = _grouped(q, k.shape[1])
        rows, key_heads, groups, length, _ = grouped.shape
        # A token's heads are adjacent in memory, so that the output projection reads the tensor that backward keeps.
        output = torch.zeros(rows, length, key_heads, groups, v.shape[-1], dtype=dtype, device=q.device)
        output = output.permute(0, 2, 3, 1, 4)
        if sinks is None:
            total = torch.full(grouped.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
        else:
            total = sinks.to(dtype).view(1, k.shape[1], -1, 1).expand(grouped.shape[:-1]).contiguous()
        ctx.replay = ReplayedDraws(q.device) if call.dropout else None
        drawn = ctx.drawn = score_blocks(q.device) if call.dropout else None
        for runs, keys, values in call.keys.round(k, v):
            for place, own, mask, places in call.blocks(runs):
                scores, _ = _scores(call, grouped[..., place, :], keys[:, :, own], mask, dtype)
                sums = scores.logsumexp(-1)
                before = total[..., place]
                after = torch.logaddexp(before, sums)
                safe = after.masked_fill(after == -torch.inf, 0)  # a query that has seen no key
                probabilities = (scores - safe[..., None]).exp().to(v.dtype)
                if (kept := call.kept(scores, q.dtype, places, drawn)) is not None:
                    probabilities *= kept
                new = (probabilities @ values[:, :, None, own]).to(dtype)
                output[..., place, :] = output[..., place, :] * (before - safe).exp()[..., None] + new
                total[..., place] = after
        if drawn is not None:
            drawn.end()
        result = output.to(q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, k, v, sinks, result, total)
        return result.flatten(1, 2).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with ctx.replay or contextlib.nullcontext():
            return _Ring._gradients(ctx, grad)

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        call = ctx.call
        q, k, v, sinks, output, total = ctx.saved_tensors
        dtype = total.dtype
        grouped = _grouped(q, k.shape[1])
        d_output = _grouped(grad.transpose(1, 2), k.shape[1])
        delta = (d_output.to(dtype) * output.to(dtype)).sum(-1)
        total = total.masked_fill(total == -torch.inf, torch.inf)  # its probabilities become 0
        d_q = torch.zeros(grouped.shape, dtype=dtype, device=q.device)
        sums = call.keys.gradients(k, v, dtype)
        for runs, keys, values in call.keys.round(k, v):
            d_k, d_v = sums.of_block()
            for place, own, mask, places in call.blocks(runs):
                q_block, d_out = grouped[..., place, :], d_output[..., place, :]
                scores, slope = _scores(call, q_block, keys[:, :, own], mask, dtype)
                probabilities = (scores - total[..., place, None]).exp()
                kept = call.kept(scores, q.dtype, places, ctx.drawn)
                used = probabilities if kept is None else probabilities * kept
                d_v[:, :, own] += (used.to(v.dtype).transpose(-1, -2) @ d_out).sum(2)
                d_scores = (d_out @ values[:, :, None, own].transpose(-1, -2)).to(dtype)
                if kept is not None:
                    d_scores *= kept
                d_scores -= delta[..., place, None]
                d_scores *= probabilities * call.scale
                if slope is not None:
                    d_scores *= slope
                d_scores = d_scores.to(q.dtype)
                d_q[..., place, :] += d_scores @ keys[:, :, None, own]
                d_k[:, :, own] += (d_scores.transpose(-1, -2) @ q_block).sum(2)
            sums.pass_on()
        if ctx.drawn is not None:
            ctx.drawn.end()
        d_k, d_v = sums.own()
        d_sinks = None
        if sinks is not None:
            share = (sinks.to(dtype).view(1, k.shape[1], -1, 1) - total).exp()
            d_sinks = -(share * delta).sum((0, 3)).flatten().to(sinks.dtype)
        return None, d_q.flatten(1, 2).to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_sinks


def _grouped(x: Tensor, key_heads: int) -> Tensor:
    """Return ``[B, heads, tokens, D]`` as ``[B, K, G, tokens, D]``."""
    grouped: Tensor = x.unflatten(1, (key_heads, -1))
    return grouped


def _scores(
    call: RingCall, q_BKGQD: Tensor, k_BKTD: Tensor, mask: _BlockMask, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return a block's scores in ``dtype``, and the derivative of the soft cap, if there is one."""
    scores = (q_BKGQD @ k_BKTD[:, :, None].transpose(-1, -2)).to(dtype) * call.scale
    slope = None
    if call.softcap is not None:
        capped = (scores / call.softcap).tanh()
        scores, slope = capped * call.softcap, 1 - capped**2
    return mask.on(scores), slope
