"""Exchange tokens for heads between the ranks of cp: each rank then has all tokens of some heads (DeepSpeed's Ulysses).

Source: Jacobs et al., "DeepSpeed Ulysses", 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import exchange_rows
from meshwright.parallel.sequence_parts import SequenceParts


class HeadExchange:
    """Exchanges tokens for heads over an axis.

    Args:
        axis: the ranks that exchange, neighbours on cp.
        first: the first of them on cp.
    """

    def __init__(self, axis: Axis, first: int):
        self.axis, self.first = axis, first

    def to_heads(self, parts: SequenceParts, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return some heads of all tokens that the ranks of the axis hold, in order: one all-to-all.

        Args:
            parts: how the ranks of cp share the sequence.
            q: this rank's queries, ``[B, heads, tokens, d]``.
            k: its keys. If there are fewer heads of keys than ranks, each head is sent to several ranks.
            v: its values.
        """
        size = self.axis.size
        sent = [torch.stack(x.chunk(size, 1)) for x in (q, self._enough(k), self._enough(v))]
        received = exchange_rows(torch.cat([x.flatten(1) for x in sent], 1), self.axis)
        found = received.split([x[0].numel() for x in sent], 1)
        stacked = (x.view(size, *like.shape[1:]) for x, like in zip(found, sent, strict=True))
        q, k, v = (parts.ordered(x, 2, self.first) for x in stacked)
        return q, k, v

    def to_tokens(self, parts: SequenceParts, output: Tensor) -> Tensor:
        """Return all heads of this rank's tokens, ``[B, tokens, heads, d]``: the inverse, by one all-to-all."""
        sent = parts.parted(output, 1, self.first, self.axis.size)
        received = exchange_rows(sent, self.axis)  # [ranks, B, tokens, some heads, d]
        return torch.cat(received.unbind(), 2)

    def _enough(self, x: Tensor) -> Tensor:
        """Repeat the heads of keys or values, so that each rank gets one."""
        heads, size = x.shape[1], self.axis.size
        return x if heads % size == 0 else x.repeat_interleave(size // heads, 1)
