"""Ring attention: keys and values go round the ranks, and each rank adds up the attention of its own queries.

Each block's contribution is merged by the logarithm of its sum of exponentials. Forward keeps only this rank's tensors;
backward sends the keys and values round again, and the gradients of each block with them, one hop more.

Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023; the recomputed probabilities are those of Dao et
al., "FlashAttention", 2022.

Shape suffixes: B batch, K key heads, G queries for each key head, Q queries of a block, T keys of a block, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.context.attend import AttentionCall, as_autocast
from meshwright.context.masks import ContextMask, query_blocks
from meshwright.faults.interpose import own_collectives
from meshwright.mesh.messages import wait_for_message
from meshwright.parallel.collectives import Axis
from meshwright.parallel.sequence_parts import Run


@dataclass(frozen=True, kw_only=True)
class RingCall:
    """One attention over the ring, with everything but queries, keys and values.

    Args:
        axis: the ranks of the ring.
        runs_of: where the tokens of each rank of the ring lie in the sequence.
        mask: the mask.
        scale: the factor of the scores.
        softcap: the bound of the scores, if the model has one.
    """

    axis: Axis
    runs_of: tuple[tuple[Run, ...], ...]
    mask: ContextMask
    scale: float
    softcap: float | None = None

    @classmethod
    def of(cls, call: AttentionCall, axis: Axis, runs_of: tuple[tuple[Run, ...], ...], *, width: int) -> RingCall:
        """Return a call of a model's attention function as one over the ring; queries have ``width`` channels."""
        scale = call.options.get("scaling")
        return cls(
            axis=axis,
            runs_of=runs_of,
            mask=call.mask,
            scale=width**-0.5 if scale is None else scale,
            softcap=call.options.get("softcap"),
        )

    @property
    def runs(self) -> tuple[Run, ...]:
        return self.runs_of[self.axis.rank]

    def blocks(self, source: int) -> Iterator[tuple[slice, slice, _BlockMask]]:
        """Yield the blocks that a rank's keys and this rank's queries share: queries, keys, and the mask.

        The keys are places among the tokens of ``source``. A block without a visible pair is left out.
        """
        for place, queries in query_blocks(self.runs):
            low, high = self.mask.visible(queries)
            offset = 0
            for run in self.runs_of[source]:
                start, stop = max(run.start, low), min(run.stop, high)
                if start < stop:
                    keys = slice(offset + start - run.start, offset + stop - run.start)
                    yield place, keys, self._mask(queries, Run(start, stop - start))
                offset += run.size

    def _mask(self, queries: Run, keys: Run) -> _BlockMask:
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


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: RingCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        grouped = _grouped(q, k.shape[1])
        rows, key_heads, groups, length, _ = grouped.shape
        # In memory, a token's heads are neighbours, so that the output projection reads what is kept for backward.
        output = torch.zeros(rows, length, key_heads, groups, v.shape[-1], dtype=dtype, device=q.device)
        output = output.permute(0, 2, 3, 1, 4)
        if sinks is None:
            total = torch.full(grouped.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
        else:
            total = sinks.to(dtype).view(1, k.shape[1], -1, 1).expand(grouped.shape[:-1]).contiguous()
        for source, (keys, values) in _round(call.axis, k, v):
            for place, own, mask in call.blocks(source):
                scores, _ = _scores(call, grouped[..., place, :], keys[:, :, own], mask, dtype)
                sums = scores.logsumexp(-1)
                before = total[..., place]
                after = torch.logaddexp(before, sums)
                safe = after.masked_fill(after == -torch.inf, 0)  # a query that has seen no key
                probabilities = (scores - safe[..., None]).exp().to(v.dtype)
                new = (probabilities @ values[:, :, None, own]).to(dtype)
                output[..., place, :] = output[..., place, :] * (before - safe).exp()[..., None] + new
                total[..., place] = after
        result = output.to(q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, k, v, sinks, result, total)
        return result.flatten(1, 2).transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        call = ctx.call
        q, k, v, sinks, output, total = ctx.saved_tensors
        dtype = total.dtype
        grouped = _grouped(q, k.shape[1])
        d_output = _grouped(grad.transpose(1, 2), k.shape[1])
        delta = (d_output.to(dtype) * output.to(dtype)).sum(-1)
        total = total.masked_fill(total == -torch.inf, torch.inf)  # its probabilities become 0
        d_q = torch.zeros(grouped.shape, dtype=dtype, device=q.device)
        sums = _GradientRing(call.axis, k, v, dtype)
        for source, (keys, values) in _round(call.axis, k, v):
            d_k, d_v = sums.of_block()
            for place, own, mask in call.blocks(source):
                q_block, d_out = grouped[..., place, :], d_output[..., place, :]
                scores, slope = _scores(call, q_block, keys[:, :, own], mask, dtype)
                probabilities = (scores - total[..., place, None]).exp()
                d_v[:, :, own] += (probabilities.to(v.dtype).transpose(-1, -2) @ d_out).sum(2)
                d_scores = (d_out @ values[:, :, None, own].transpose(-1, -2)).to(dtype) - delta[..., place, None]
                d_scores *= probabilities * call.scale
                if slope is not None:
                    d_scores *= slope
                d_scores = d_scores.to(q.dtype)
                d_q[..., place, :] += d_scores @ keys[:, :, None, own]
                d_k[:, :, own] += (d_scores.transpose(-1, -2) @ q_block).sum(2)
            sums.pass_on(d_k, d_v)
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


def _round(axis: Axis, k: Tensor, v: Tensor) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield each rank's keys and values, beginning with this rank's; the next ones travel while a block is used."""
    both = torch.cat([k, v], -1).contiguous()
    for hop in range(axis.size):
        arrive = _start_shift(both, axis) if hop < axis.size - 1 else None
        yield (axis.rank - hop) % axis.size, (both[..., : k.shape[-1]], both[..., k.shape[-1] :])
        if arrive is not None:
            both = arrive()


class _GradientRing:
    """The gradients of the keys and values that go round, which every rank adds to and passes on with its block."""

    def __init__(self, axis: Axis, k: Tensor, v: Tensor, dtype: torch.dtype):
        self.axis, self.size = axis, k.shape[-1]
        self._like = torch.cat([k, v], -1).shape, dtype, k.device
        self._arrive: Callable[[], Tensor] | None = None

    def of_block(self) -> tuple[Tensor, Tensor]:
        """Return zeros, to which the gradients of the current block are added."""
        shape, dtype, device = self._like
        self._both = torch.zeros(shape, dtype=dtype, device=device)
        return self._both[..., : self.size], self._both[..., self.size :]

    def pass_on(self, d_k: Tensor, d_v: Tensor) -> None:
        """Add what the ranks before have found for the block, and send the sum to the next rank."""
        if self._arrive is not None:
            self._both += self._arrive()
        self._arrive = _start_shift(self._both, self.axis)

    def own(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values, after their way around the ring."""
        assert self._arrive is not None
        both = self._arrive()
        return both[..., : self.size], both[..., self.size :]


@own_collectives()
def _start_shift(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Start to send ``x`` to the next rank of a ring; the returned function waits for that of the rank before."""
    if axis.size == 1:
        return lambda: x
    assert axis.group is not None
    out = torch.empty_like(x)
    ranks = dist.get_process_group_ranks(axis.group)
    following, previous = ranks[(axis.rank + 1) % axis.size], ranks[axis.rank - 1]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, following, group=axis.group),
            dist.P2POp(dist.irecv, out, previous, group=axis.group),
        ]
    )

    sent = x  # must live until it has left

    def wait() -> Tensor:
        for work in works:
            wait_for_message(work, axis.group, out.device)
        assert sent.shape == out.shape
        return out

    return wait
