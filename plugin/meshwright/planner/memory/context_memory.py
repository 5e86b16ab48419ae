"""The temporary memory of attention, in plain operations or in blocks of queries under cp, and of whole embeddings."""

from __future__ import annotations

from meshwright.plan.context_methods import BLOCK, group_sizes, local_tokens
from meshwright.planner.context_cost import exchanged_keys, runs_flash, shares_keys
from meshwright.planner.job.candidate import Candidate
from meshwright.planner.job.layer_shape import LayerShape
from meshwright.planner.job.shapes import ModelShape

# Bytes of all tensors of the size of a block's scores that are alive at the same time, the last block's included.
_SCORES_FORWARD = {2: 14, 4: 16}
_SCORES_BACKWARD = {2: 18, 4: 20}
# The same in terms of scores, for torch's plain operations on CUDA: in forward the scores, their softmax, and which are
# minus infinity; in backward the gradients of softmax and scores, and the product of the former with the softmax.
_MATH_FORWARD, _MATH_BACKWARD = 2.25, 3


def attention_memory(
    layer: LayerShape, plan: Candidate, *, seq_len: int, element_bytes: int, plain: bool = False
) -> tuple[float, float]:
    """Return the bytes that the attention of one layer needs in forward and in backward, besides what it saves.

    Args:
        layer, plan, seq_len, element_bytes: the layer, the plan, and the sizes.
        plain: whether attention over shared keys is not fused, as ``Job.plain_attention``.

    Example:
        >>> layer = LayerShape(count=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128)
        >>> ulysses, ring = (attention_memory(layer, Candidate(cp=4, context=method), seq_len=32768, element_bytes=2)
        ...                  for method in ("ulysses", "ring"))
        >>> ulysses[0] < ring[0] < ring[1]
        True
    """
    if plain and shares_keys(layer, plan, seq_len):
        scores = plan.micro_batch * seq_len**2 * element_bytes * layer.heads / plan.tp
        return _MATH_FORWARD * scores, _MATH_BACKWARD * scores
    if plan.cp == 1:
        return 0.0, 0.0
    b, inner = element_bytes, group_sizes(plan.context, plan.cp, plan.ulysses)[0]
    has_flash = runs_flash(layer, seq_len)
    if plan.context in ("gather", "ulysses") and not has_flash:
        return _in_blocks(layer, plan, seq_len, b)
    rows = plan.micro_batch * local_tokens(seq_len, plan.cp)
    query, keys = layer.query_width / plan.tp, exchanged_keys(layer, plan)
    sent = b * rows * (query + 2 * keys) * 2 if inner > 1 else 0.0  # both sides of an exchange of heads
    if plan.context == "ulysses":
        return sent, sent
    forward, backward = _of_blocks(layer, plan, seq_len, b) if not has_flash else _of_flash(rows * query, b)
    if plan.context == "gather":
        gathered, sums = (plan.cp * rows * 2 * keys * size for size in (b, max(4, b)))
        in_blocks = 2 * gathered + sums + backward  # the keys, and a block's gradients of most of them
        return max(2 * gathered, gathered + forward), max(in_blocks, gathered + 2 * sums)
    shifted = 2 * rows * 2 * keys * b
    return max(forward + shifted, sent), max(backward + shifted + 3 * rows * 2 * keys * 4, sent)


def embedding_memory(shape: ModelShape, plan: Candidate, *, seq_len: int, element_bytes: int) -> float:
    """Return the bytes of the embeddings of whole rows, which a decoder's forward holds under cp until it returns."""
    return 0.0 if plan.cp == 1 else float(plan.micro_batch * seq_len * shape.hidden * element_bytes)


def _of_flash(queries: float, b: int) -> tuple[float, float]:
    """Return the bytes of forward and of backward, without keys, in blocks of up to half of a rank's queries."""
    wide = max(4, b)
    copies = queries * wide if b < wide else 0.0  # the result, before it is rounded
    block = queries / 2
    forward = copies + block * (b + 2 * wide)
    backward = queries * wide + copies + block * b
    return forward, backward


def _of_blocks(layer: LayerShape, plan: Candidate, seq_len: int, b: int) -> tuple[float, float]:
    """Return the bytes of blocks of up to BLOCK queries and the keys of a run; a rank of a ring has two runs."""
    inner = group_sizes(plan.context, plan.cp, plan.ulysses)[0]
    local = local_tokens(seq_len, plan.cp)
    run, queries = inner * local // 2, plan.micro_batch * local * layer.query_width / plan.tp
    scores = plan.micro_batch * layer.heads / plan.tp / inner * min(BLOCK, run) * run
    return _SCORES_FORWARD[b] * scores + queries * 4, _SCORES_BACKWARD[b] * scores + queries * (2 * 4 + b)


def _in_blocks(layer: LayerShape, plan: Candidate, seq_len: int, b: int) -> tuple[float, float]:
    """Return the bytes of attention over all keys by the model's own function, a block of queries at a time."""
    inner = plan.cp if plan.context == "ulysses" else 1
    padded = plan.cp * local_tokens(seq_len, plan.cp)
    whole = plan.micro_batch * padded
    query, keys = layer.query_width / plan.tp / inner, exchanged_keys(layer, plan) / inner
    block = min(BLOCK, padded // 2 if inner > 1 else local_tokens(seq_len, plan.cp) // 2)
    seen = padded if layer.windowed < 1 or layer.window is None else min(padded, layer.window + block)
    repeated = plan.micro_batch * seen * 2 * query * b if keys < query else 0.0
    scores = plan.micro_batch * layer.heads / plan.tp / inner * block * seen if layer.traits.keeps_scores else 0.0
    places = block * seen  # a mask is made as booleans, and then has the dtype of the scores
    gathered = whole * 2 * keys * b if inner == 1 else 0.0
    own = plan.micro_batch * block * query * b * 4
    forward = max(2 * gathered, gathered + repeated + (b + 2) * places + own + _SCORES_FORWARD[b] * scores)
    sums = whole * 2 * keys * 4
    at_block = sums + 2 * repeated + 2 * plan.micro_batch * seen * 2 * keys * b + (b + 0.5) * places
    backward = gathered + max(at_block + _SCORES_BACKWARD[b] * scores, 2 * sums if inner == 1 else 0.0)
    return forward, backward
