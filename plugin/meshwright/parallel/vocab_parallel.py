"""Shard the vocabulary over the TP axis: each rank embeds and scores its own words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from meshwright.layout.row_layout import RowLayout
from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import reduce, share, unsplit_rows
from meshwright.parallel.deferred_logits import InHead
from meshwright.parallel.stand_in import ShardedLogits
from meshwright.parallel.tensor_checks import require_words


class VocabParallelEmbedding:
    """Hooks that make a stock embedding look up the rows that this rank holds and sum the results over the axis."""

    def __init__(self, embedding: nn.Embedding, rows: RowLayout, axis: Axis):
        self.axis, self.words = axis, rows.size
        ((self.first, self.stop),) = rows.spans[axis.rank]
        self._elsewhere: Tensor | None = None
        if embedding.padding_idx is not None:
            local = embedding.padding_idx - self.first
            embedding.padding_idx = local if self.first <= embedding.padding_idx < self.stop else None
        embedding.register_forward_pre_hook(self._localise)
        embedding.register_forward_hook(self._sum)

    def _localise(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        (words, *rest) = args
        require_words(words, self.words, "token id")
        self._elsewhere = (words < self.first) | (words >= self.stop)
        return ((words - self.first).masked_fill(self._elsewhere, 0), *rest)

    def _sum(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        assert self._elsewhere is not None
        elsewhere, self._elsewhere = self._elsewhere, None
        return reduce(output.masked_fill(elsewhere.unsqueeze(-1), 0), self.axis)


class VocabParallelHead:
    """Hooks on the language-model head: local logits for the sharded loss, whole logits for everything else.

    Args:
        keep_sharded: a function called in each forward; it returns whether only the sharded loss will use the logits.
    """

    def __init__(self, head: nn.Linear, vocab_size: int, axis: Axis, keep_sharded: Callable[[], bool]):
        self.axis, self.vocab_size, self.keep_sharded = axis, vocab_size, keep_sharded
        head.register_forward_pre_hook(self._share)
        head.register_forward_hook(self._deliver)

    def _share(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args if isinstance(args[0], InHead) else (share(args[0], self.axis), *args[1:])

    def _deliver(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if isinstance(args[0], InHead) or isinstance(output, ShardedLogits):
            return output
        if self.keep_sharded():
            return output.as_subclass(ShardedLogits)
        return gather_words(output, self.axis)[..., : self.vocab_size]


def gather_words(logits: Tensor, axis: Axis) -> Tensor:
    """Gather whole logits from each rank's words; differentiable for a replicated consumer."""
    if axis.size == 1:
        return logits
    words_first = logits.movedim(-1, 0).contiguous()
    return unsplit_rows(words_first, axis).movedim(0, -1)
