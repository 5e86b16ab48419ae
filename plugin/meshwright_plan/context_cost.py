"""Context parallelism in the planner: which methods a model can use, what each sends, and what it adds to attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.plan.parts import Method, can_exchange, group_sizes, local_tokens
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.layer_shape import LayerShape
from meshwright_plan.job.shapes import ModelShape

Kind = Literal["all-gather", "reduce-scatter", "all-to-all", "send"]
# Bytes moved through memory for each visible score of 16-bit queries and keys in a ring whose blocks are computed by
# separate kernels: the products, and the passes over 32-bit scores for the softmax and its gradient.
_RING_FORWARD, _RING_BACKWARD = 68, 86
_SHARED_KEYS = 256  # channels of a head up to which transformers does not repeat keys that query heads share
_MERGE = 26  # bytes moved per element to merge a block's result with other results in 32 bits
_ADD = 10  # bytes moved per element to add a block's gradients to others


@dataclass(frozen=True, kw_only=True)
class ContextExchange:
    """Collectives of one layer and one micro-batch over ranks of cp.

    Args:
        kind: the kind of collective.
        count: number of calls.
        bytes: size of the whole tensor that one call gathers, reduces, exchanges or sends.
        ranks: number of ranks that take part.
        neighbours: distance on cp between two of these ranks.
        overlaps: whether attention is computed at the same time.
    """

    kind: Kind
    count: int
    bytes: int
    ranks: int
    neighbours: int = 1
    overlaps: bool = False


Exchanges = tuple[list[ContextExchange], list[ContextExchange]]  # in forward and in backward


def exchanges(layer: LayerShape, plan: Candidate, job: Job) -> Exchanges:
    """Return what one layer sends over cp for one micro-batch, in forward and in backward without recompute.

    The ranks add up the gradients of keys and values in 32 bits or more.

    Example:
        >>> layer = LayerShape(count=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128)
        >>> forward, backward = exchanges(layer, Candidate(cp=4, context="ring"), Job(seq_len=64, global_batch=1))
        >>> [(x.kind, x.count, x.bytes) for x in (*forward, *backward)]
        [('send', 3, 4096), ('send', 3, 4096), ('send', 4, 8192)]
    """
    if plan.cp == 1:
        return [], []
    rows = plan.micro_batch_size * local_tokens(job.seq_len, plan.cp)
    keys, element_bytes, wide = layer.local_kv_width(plan.tp), job.element_bytes, max(4, job.element_bytes)
    if plan.context == "gather":
        whole = plan.cp * rows * 2 * keys
        gather = ContextExchange(kind="all-gather", count=1, bytes=whole * element_bytes, ranks=plan.cp)
        return [gather], [gather, ContextExchange(kind="reduce-scatter", count=1, bytes=whole * wide, ranks=plan.cp)]
    inner, outer = group_sizes(plan.context, plan.cp, plan.ulysses)
    forward: list[ContextExchange] = []
    if inner > 1:
        query = layer.query_width // plan.tp
        keys = exchanged_keys(layer, plan)
        sizes = (query + 2 * keys, query)  # q, k and v together, and the output
        forward = [
            ContextExchange(kind="all-to-all", count=1, bytes=rows * n * element_bytes, ranks=inner) for n in sizes
        ]
    backward = list(forward)
    if outer > 1:

        def shifts(count: int, width: int) -> ContextExchange:
            size = rows * 2 * keys * width
            return ContextExchange(kind="send", count=count, bytes=size, ranks=outer, neighbours=inner, overlaps=True)

        forward.append(shifts(outer - 1, element_bytes))
        backward += [shifts(outer - 1, element_bytes), shifts(outer, wide)]
    return forward, backward


def exchanged_keys(layer: LayerShape, plan: Candidate) -> int:
    """Return the elements of k per position of a rank, with the heads that an exchange of heads repeats."""
    inner, _ = group_sizes(plan.context, plan.cp, plan.ulysses)
    keys = layer.local_kv_width(plan.tp)
    return max(keys, inner * layer.head_dim) if inner > 1 else keys


def runs_flash(layer: LayerShape, seq_len: int) -> bool:
    """Return whether this version computes the blocks of attention by flash kernels, which take no mask or soft cap."""
    return not layer.traits.keeps_scores and (layer.window is None or layer.window >= seq_len)


def shares_keys(layer: LayerShape, plan: Candidate, seq_len: int) -> bool:
    """Return whether torch's attention gets keys that query heads share, for which CUDA has no fused kernel in float32.

    Without a mask, transformers hands keys to torch that several query heads share, if heads have up to 256 channels.
    Of CUDA's fused kernels, those that read such keys are for 16 bits, and the one for 32 bits does not read them, so
    torch runs plain operations, which keep the scores.

    Example:
        >>> layer = LayerShape(count=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128)
        >>> [shares_keys(layer, Candidate(tp=tp), 64) for tp in (1, 2, 4)]
        [True, True, False]
    """
    if plan.cp > 1 or layer.measured is not None or layer.head_dim > _SHARED_KEYS:
        return False
    return layer.local_kv_width(plan.tp) < layer.query_width / plan.tp and runs_flash(layer, seq_len)


def block_bytes(layer: LayerShape, plan: Candidate, job: Job) -> tuple[float, float]:
    """Return the bytes that are moved to put a layer's blocks together, in forward and in backward."""
    outer = group_sizes(plan.context, plan.cp, plan.ulysses)[1]
    if plan.cp == 1 or (outer == 1 and plan.context != "gather"):
        return 0.0, 0.0
    rows = plan.micro_batch_size * job.seq_len / plan.cp
    if not runs_flash(layer, job.seq_len):
        scores = rows * layer.heads / plan.tp * layer.attended(job.seq_len) * job.element_bytes / 2
        return (_RING_FORWARD * scores, _RING_BACKWARD * scores) if outer > 1 else (0.0, 0.0)
    # All queries attend to half of the keys of a rank before it, and half of them to all keys of a rank after it.
    merges = 0.5 + 0.75 * (outer - 1) if outer > 1 else 1.0
    query, keys = rows * layer.query_width / plan.tp, rows * 2 * exchanged_keys(layer, plan)
    return _MERGE * query * merges, _ADD * (query + keys) * merges


def attends_twice(layer: LayerShape, plan: Candidate, job: Job) -> bool:
    """Return whether backward runs attention again, block by block, instead of keeping its result."""
    return plan.cp > 1 and plan.context in ("gather", "ulysses") and not runs_flash(layer, job.seq_len)


def methods(shape: ModelShape, cp: int, tp: int) -> Iterator[tuple[Method, int | None, str | None]]:
    """Yield each method over ``cp`` ranks as (context, ulysses, the reason against it or None).

    Example:
        >>> shape = ModelShape.of(name="m", layers=2, hidden=64, heads=6, kv_heads=2, head_dim=16, ffn=128, vocab=100)
        >>> [(context, ulysses) for context, ulysses, reason in methods(shape, 4, 1) if reason is None]
        [('gather', None), ('ring', None), ('hybrid', 2)]
    """
    if cp == 1:
        yield "gather", None, None
        return

    def reason(ranks: int) -> str | None:
        if "ulysses" not in shape.traits.context:
            return "the attention reads all heads, so it cannot run on some of them"
        for run in shape.runs:
            heads, key_heads = run.heads // tp, run.local_kv_width(tp) // run.head_dim
            if not can_exchange(heads, key_heads, ranks):
                of_tp = f" of each rank of tp={tp}" if tp > 1 else ""
                return f"{heads} query and {key_heads} key heads{of_tp} cannot be shared by {ranks} ranks"
        return None

    yield "gather", None, None
    yield "ulysses", None, reason(cp)
    yield "ring", None, None
    for ranks in range(2, cp):
        if cp % ranks == 0:
            yield "hybrid", ranks, reason(ranks)
