"""Shard the vocabulary over the TP axis: each rank embeds and scores its own words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.layout.row_layout import RowLayout
from meshwright.mesh.axes import Axis
from meshwright.parallel.async_numbers import require_words
from meshwright.parallel.collectives import reduce, share, unsplit_rows
from meshwright.parallel.foreign_hooks import has_foreign_hooks
from meshwright.parallel.method_chain import ChainStep, StepOrder, add_step
from meshwright.parallel.shards.stand_in import ROW_READS, InHead, ShardedLogits, reading_shards, values_of
from meshwright.temporarily import temporarily


class VocabParallelEmbedding(ChainStep):
    """The forward of a stock embedding that looks up the rows of this rank, and sums the results over the axis.

    It is inside of the module's hooks, so those of the program see all words and whole vectors.
    """

    order = StepOrder.VOCABULARY

    def __init__(self, embedding: nn.Embedding, rows: RowLayout, axis: Axis):
        self.embedding, self.axis, self.words = embedding, axis, rows.size
        ((self.first, self.stop),) = rows.spans[axis.rank]
        self._padding = embedding.padding_idx  # which the model's code may read too
        add_step(embedding, self)

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        words = args[0] if args else kwargs.pop("input")
        require_words(words, self.words, "token id")
        elsewhere = (words < self.first) | (words >= self.stop)
        own = self._padding
        if own is not None:
            own = own - self.first if self.first <= own < self.stop else None
        with temporarily(self.embedding, padding_idx=own):
            output = self.method((words - self.first).masked_fill(elsewhere, 0), *args[1:], **kwargs)
        return reduce(output.masked_fill(elsewhere.unsqueeze(-1), 0), self.axis)


class RowReads:
    """Hooks on a model whose forward may read a row of an embedding's weight, such as that of the word for padding.

    Args:
        model: the model; outside of its forward such a read raises, since not every rank need make it.
        embedding: the embedding.
        rows: which rows of its weight each rank holds.
        axis: the axis of these ranks.
    """

    def __init__(self, model: nn.Module, embedding: nn.Embedding, rows: RowLayout, axis: Axis):
        self.axis, self._running = axis, 0
        ((self.first, self.stop),) = rows.spans[axis.rank]
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave, always_call=True)
        embedding.weight.__dict__[ROW_READS] = self

    def _enter(self, module: nn.Module, args: tuple[object, ...]) -> None:
        self._running += 1

    def _leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        self._running -= 1

    def row(self, weight: Tensor, index: Any) -> Tensor | None:
        """Return ``weight[index]`` of the whole weight for a number of a row, in forward; None for any other read."""
        word, *rest = index if isinstance(index, tuple) else (index,)
        if not self._running or type(word) is not int or any(x != slice(None) for x in rest) or values_of(weight):
            return None
        is_here = self.first <= word < self.stop
        with reading_shards():
            row = weight[word - self.first if is_here else 0]
            elsewhere = torch.full((), not is_here, device=row.device)
            return reduce(row.masked_fill(elsewhere, 0), self.axis)


class VocabParallelHead(ChainStep):
    """The forward of a language-model head: local logits for the sharded loss, whole logits for everything else.

    It is inside of the module's hooks. Where the program has hooks on the head, these see whole logits, and so does the
    loss.

    Args:
        keep_sharded: a function called in each forward; it returns whether only the sharded loss will use the logits.
    """

    order = StepOrder.VOCABULARY

    def __init__(self, head: nn.Linear, vocab_size: int, axis: Axis, keep_sharded: Callable[[], bool]):
        self.head, self.axis, self.vocab_size, self.keep_sharded = head, axis, vocab_size, keep_sharded
        add_step(head, self)

    def __call__(self, x: Tensor | InHead) -> Tensor:
        if isinstance(x, InHead):
            logits: Tensor = self.method(x)
            return logits
        output: Tensor = self.method(share(x, self.axis))
        if isinstance(output, ShardedLogits):
            return output
        if self.keep_sharded() and not has_foreign_hooks(self.head, backward=True):
            return output.as_subclass(ShardedLogits)
        return gather_words(output, self.axis)[..., : self.vocab_size]


def gather_words(logits: Tensor, axis: Axis) -> Tensor:
    """Gather whole logits from each rank's words; differentiable for a replicated consumer."""
    if axis.size == 1:
        return logits
    words_first = logits.movedim(-1, 0).contiguous()
    return unsplit_rows(words_first, axis).movedim(0, -1)
