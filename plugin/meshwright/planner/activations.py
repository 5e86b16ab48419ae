"""What forward leaves for backward on one rank of this version's runtime, in bytes, operation by operation.

Each number is that of a tensor which the code saves: transformers' layers, torch's fused attention, and the
runtime's own loss and sequence parallelism. ``meshwright plan --trace`` reads the same off a traced step.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.candidate import Candidate
from meshwright.planner.family_traits import Traits
from meshwright.planner.shapes import ModelShape


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes of one micro-batch.

    Args:
        layer: of one decoder layer; ``attention`` of its attention block.
        kept: of one layer that backward computes again.
        shared: sines and cosines, made once for all layers.
        arguments: positions and masks, which layers that are computed again are called with.
        head: of the last norm, the head and the loss, the logits included.
        logits: of the logits alone, as the loss keeps them.
    """

    layer: float
    attention: float
    kept: float
    shared: float
    arguments: float
    head: float
    logits: float

    def total(self, layers: int, recomputed: int) -> float:
        """Return the bytes of a model, ``recomputed`` of whose layers backward computes again."""
        held = (layers - recomputed) * self.layer + recomputed * self.kept + self.shared + self.head
        return held + (self.arguments if recomputed else 0)


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Elements that one position has on this rank.

    Args:
        hidden: of the residual stream between blocks.
        query, keys: of q, and of k or of v.
        ffn: of the MLP.
        words: of the logits.
        heads, key_heads: heads of q and of k.
    """

    hidden: float
    query: float
    keys: float
    ffn: float
    words: float
    heads: float
    key_heads: float


def saved_activations(shape: ModelShape, plan: Candidate, *, seq_len: int, element_bytes: int) -> Saved:
    """Return what one micro-batch leaves.

    Args:
        shape: the model.
        plan: its tp, sequence_parallel and micro_batch decide.
        seq_len: tokens of a sequence.
        element_bytes: of the model's dtype: 2, or 4 for float32.

    Example:
        >>> shape = ModelShape(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                    vocab=32000)
        >>> saved = saved_activations(shape, Candidate(), seq_len=2048, element_bytes=2)
        >>> round(saved.layer / (2048 * 4096), 2)
        45.53
    """
    b, traits, tp = element_bytes, shape.traits, plan.tp
    n = plan.micro_batch * seq_len
    # Of the positions between blocks, the share that this rank holds; padded where they do not divide.
    share = -(-seq_len // tp) / seq_len if plan.sequence_parallel else 1.0
    sizes = _Sizes(
        hidden=shape.hidden * share,
        query=shape.query_width / tp,
        keys=shape.local_kv_width(tp),
        ffn=shape.ffn / tp,
        words=-(-shape.vocab // tp),
        heads=shape.heads / tp,
        key_heads=shape.local_kv_width(tp) / shape.head_dim,
    )
    # A norm keeps its input in 32 bits, one number a position, and what its weight multiplies.
    normed = 4 if traits.norms_in_float32 else b
    norm = n * (sizes.hidden * (4 + normed) + 4 * share)
    norm += 4 * shape.hidden if traits.norm_copies_weight else 0
    inputs = 2 * n * sizes.hidden * b  # of the attention's and the MLP's first projections
    block = (traits.norms * norm + inputs) / 2
    attention = block + n * _attention(shape, sizes, seq_len, b) + _query_norm(sizes, traits, n, b, tp)
    mlp = block + n * b * sizes.ffn * (4 if shape.gated else 2)

    logits = 4.0 * n * sizes.words
    # The targets, and whose words they are; the head reads whole rows.
    head = norm + n * shape.hidden * b + logits + n * (8 if tp == 1 else 22)
    head += n * sizes.words * b if traits.caps_logits else 0
    shared = 2.0 * seq_len * shape.head_dim * (4 if traits.rotates_in_float32 else b)
    return Saved(
        layer=attention + mlp,
        attention=attention,
        kept=n * sizes.hidden * b,
        shared=shared,
        arguments=8 * seq_len + _masks(shape, n, seq_len, b),
        head=head,
        logits=logits,
    )


def _is_masked(shape: ModelShape, seq_len: int) -> bool:
    """Whether a window needs a mask, for which the fused kernel takes keys and values of every query head."""
    return shape.window is not None and shape.window < seq_len and not shape.traits.keeps_scores


def _masks(shape: ModelShape, n: int, seq_len: int, b: int) -> float:
    """Bytes of the masks, one for windowed layers and one for the others, as the layers are given them."""
    if shape.traits.keeps_scores:
        kinds = (shape.window_layers > 0) + (shape.window_layers < shape.layers)
        return n * seq_len * b * kinds
    return seq_len**2 if _is_masked(shape, seq_len) else 0


def _attention(shape: ModelShape, sizes: _Sizes, seq_len: int, b: int) -> float:
    """Bytes of a position between q, k, v and the output projection."""
    if shape.traits.keeps_scores:
        # q, k and v for every query head, the output twice over; scores capped, their softmax in 32 bits and back.
        capped = b
        scores = sizes.heads * seq_len * (capped + 4 + (b if b < 4 else 0))
        return b * 4 * sizes.query + scores
    masked = _is_masked(shape, seq_len)
    keys = sizes.query if masked and sizes.key_heads > 1 else sizes.keys  # one head is repeated without a copy
    # One projection's v is a part of it, and leaves an output that has to be copied; unless v is repeated.
    values = keys
    if shape.traits.fused_qkv:
        values = sizes.query + (keys if masked else sizes.query + 2 * sizes.keys)
    return b * (2 * sizes.query + keys + values + (seq_len if masked else 0)) + 4 * sizes.heads


def _query_norm(sizes: _Sizes, traits: Traits, n: int, b: int, tp: int) -> float:
    """Bytes of a layer's norms of q and k."""
    width, heads = sizes.query + sizes.keys, sizes.heads + sizes.key_heads
    normed = 4 if traits.norms_in_float32 else b
    if traits.query_norm == "head":
        return n * (width * (4 + normed) + 4 * heads)
    if traits.query_norm == "whole":
        if tp == 1:
            return n * (width * (4 + normed) + 8)
        # The mean of squares is joined over tp, in steps that each keep what they multiply.
        return n * (width * 12 + 32) if b == 4 else n * (width * (12 + b) + 36) + 4 * width
    return 0.0
