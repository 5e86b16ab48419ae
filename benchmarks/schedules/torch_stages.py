"""The stages that torch's schedules run: the stock model with fewer layers, or a module written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TorchStage(Protocol):
    """A stage of a Llama, as a user of ``torch.distributed.pipelining`` cuts it."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the hidden states for the next stage, or the logits, given tokens or hidden states."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a micro-batch; torch's schedules divide by the number of micro-batches."""


class StockStage(nn.Module):
    """The stock ``LlamaForCausalLM`` with the layers of one stage, called through its own forward.

    Args:
        whole: the whole model, whose other layers are removed.
        span: the indices of the layers.
    """

    def __init__(self, whole: Any, span: range):
        super().__init__()
        decoder, count = whole.model, len(whole.model.layers)
        decoder.layers = decoder.layers[span.start : span.stop]
        self.is_first, self.is_last = span.start == 0, span.stop == count
        if not self.is_first:
            decoder.embed_tokens = None
        if not self.is_last:
            decoder.norm, whole.lm_head = nn.Identity(), None
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        given = {"input_ids" if self.is_first else "inputs_embeds": x}
        result: Tensor = self.whole(**given).logits if self.is_last else self.whole.model(**given).last_hidden_state
        return result

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.whole.loss_function(logits, labels, vocab_size=self.whole.config.vocab_size)
        return loss


class HandStage(nn.Module):
    """Some layers of a Llama, called one after the other without the model's own forward and without masks.

    Args:
        whole: the whole model.
        span: the indices of the layers.
    """

    def __init__(self, whole: Any, span: range):
        super().__init__()
        is_last = span.stop == len(whole.model.layers)
        self.embed = whole.model.embed_tokens if span.start == 0 else None
        self.layers = nn.ModuleDict({str(i): whole.model.layers[i] for i in span})
        self.norm: Any = whole.model.norm if is_last else None
        self.head: Any = whole.lm_head if is_last else None
        self.rotary = whole.model.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1])[None]
        table = self.rotary(x, positions)
        for layer in self.layers.values():
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=table)
        return x if self.head is None else self.head(self.norm(x))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


STAGES: dict[str, Callable[[Any, range], TorchStage]] = {"stock": StockStage, "hand": HandStage}
