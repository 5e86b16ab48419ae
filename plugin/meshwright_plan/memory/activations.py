"""The bytes that forward saves for backward on one rank, and the temporary memory of head, loss, attention and
embeddings.

Each number is the size of a tensor that the code saves: transformers' layers, torch's fused attention, and the
runtime's own loss and sequence parallelism. ``meshwright plan --trace`` measures the same bytes in a traced step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.plan.parts import BLOCK, SUMMED_WORDS, group_sizes, head_chunk, local_tokens
from meshwright_plan.context_cost import exchanged_keys, runs_flash, shares_keys
from meshwright_plan.job.adapters import ADAPTER_BYTES, Lora, saved_by_adapters
from meshwright_plan.job.candidate import Candidate, Job, Logits
from meshwright_plan.job.layer_shape import LayerShape
from meshwright_plan.job.measured import RankShare, TowerShape
from meshwright_plan.job.shapes import ModelShape


def rank_tokens(plan: Candidate, job: Job) -> int:
    """Return the tokens of a rank's micro-batch."""
    return plan.micro_batch_size * local_tokens(job.seq_len, plan.cp)


def saved_by_head(shape: ModelShape, plan: Candidate, job: Job) -> float:
    """Return the bytes that the head and the loss save for backward.

    Example:
        >>> shape = ModelShape.of(name="m", layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=1000)
        >>> jobs = [Job(seq_len=16, global_batch=1, logits=logits) for logits in ("chunked", "sharded", "gathered")]
        >>> [saved_by_head(shape, Candidate(tp=2), job) for job in jobs]
        [66048, 34048, 66048]
    """
    tokens, b, logits, frozen = rank_tokens(plan, job), job.element_bytes, job.logits, job.lora is not None
    if logits == "chunked":  # the gradients of the head's input and weight
        return (tokens + (0 if frozen else _words(shape, plan, logits))) * shape.hidden * b
    # The head's input, which a frozen head does not read again, and a softmax in 32 bits.
    return tokens * ((0 if frozen else shape.hidden * b) + 4 * _words(shape, plan, logits))


def head_peak(shape: ModelShape, plan: Candidate, job: Job) -> float:
    """Return the bytes of the head and the loss at their peak, from the head's input on.

    Example:
        >>> shape = ModelShape.of(name="8B", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336,
        ...                       vocab=128256)
        >>> whole = 4 * 8192 * 128256  # 32-bit logits
        >>> round(head_peak(shape, Candidate(), Job(seq_len=8192, global_batch=1)) / whole, 2)
        0.78
    """
    tokens, b, logits, frozen = rank_tokens(plan, job), job.element_bytes, job.logits, job.lora is not None
    cpu = job.on_cpu  # where 16-bit products are widened before they are summed
    if logits != "chunked":
        own, read = tokens * _words(shape, plan, "sharded"), tokens * _words(shape, plan, logits)
        # The loss of a part of the words overwrites 32-bit logits; torch's loss keeps the logarithm of the softmax.
        in_loss = 4 * read * ((b < 4) + _is_whole(plan, logits))
        # A rank's own logits are freed before the loss reads the gathered ones.
        peak = b * read + max(b * own, in_loss) if read > own else b * own + in_loss
        return tokens * shape.hidden * b + peak
    words, traits = _words(shape, plan, logits), shape.traits
    chunk = head_chunk(tokens, shape.hidden, element_bytes=logit_bytes(shape, b), cpu=cpu, frozen=frozen)
    scores, weight = b * chunk * words, 0 if frozen else words * shape.hidden * b
    if traits.casts_logits and b < 4:  # the loss overwrites the cast ones, whose gradient is cast back
        in_loss = scores + 4 * chunk * words * (1 + traits.caps_logits) + scores
        scores *= 2  # the logits and their gradient
    else:  # the loss overwrites logits, on CPU a copy in 32 bits; a cap keeps its result
        in_loss = scores * (1 + traits.caps_logits) + (4 * chunk * words if b < 4 and cpu else 0)
    if chunk == tokens or frozen:
        peak = max(in_loss, scores + weight)
    else:
        widened = 4 * chunk * (min(SUMMED_WORDS, words) + shape.hidden) if cpu and b < 4 else 0
        peak = words * shape.hidden * max(4, b) + max(in_loss, scores + widened, weight if b < 4 else 0)
    return 2 * tokens * shape.hidden * b + peak  # the head's input, and its gradient


def after_head(shape: ModelShape, plan: Candidate, job: Job) -> float:
    """Return the bytes that the backward of the loss needs at its peak, besides what forward saved."""
    tokens, b, logits = rank_tokens(plan, job), job.element_bytes, job.logits
    if logits == "chunked":
        return 0.0
    words, read = _words(shape, plan, "sharded"), tokens * _words(shape, plan, logits)
    # The loss of a part of the words overwrites the softmax by the logits' gradient; torch's loss makes two tensors.
    in_loss = 8 * read if _is_whole(plan, logits) else b * read * (b < 4)
    in_head = b * (tokens * words + words * shape.hidden + tokens * shape.hidden)
    return max(in_loss, in_head - 4 * read)  # the softmax is free when the head begins


def logit_bytes(shape: ModelShape, b: int) -> int:
    """Return the most bytes that one of a model's logits has between the head and the loss."""
    return max(b, 4 * shape.traits.casts_logits)


def _words(shape: ModelShape, plan: Candidate, logits: Logits) -> int:
    return shape.outputs if logits == "gathered" else -(-shape.outputs // plan.tp)


def _is_whole(plan: Candidate, logits: Logits) -> bool:
    """Return whether the loss sees all words, so that it is torch's cross-entropy."""
    return logits == "gathered" or plan.tp == 1


# Bytes of all tensors of the size of a block's scores that are alive at the same time, the last block's included.
_SCORES_FORWARD = {2: 14, 4: 16}
_SCORES_BACKWARD = {2: 18, 4: 20}
# The same in terms of scores, for torch's plain operations on CUDA: in forward the scores, their softmax, and which are
# minus infinity; in backward the gradients of softmax and scores, and the product of the former with the softmax.
_MATH_FORWARD, _MATH_BACKWARD = 2.25, 3


def attention_memory(layer: LayerShape, plan: Candidate, job: Job) -> tuple[float, float]:
    """Return the bytes that the attention of one layer needs in forward and in backward, besides what it saves.

    Example:
        >>> layer = LayerShape(count=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128)
        >>> job = Job(seq_len=32768, global_batch=1)
        >>> ulysses, ring = (attention_memory(layer, Candidate(cp=4, context=method), job)
        ...                  for method in ("ulysses", "ring"))
        >>> ulysses[0] < ring[0] < ring[1]
        True
    """
    seq_len, b = job.seq_len, job.element_bytes
    if job.plain_attention and shares_keys(layer, plan, seq_len):
        scores = plan.micro_batch_size * seq_len**2 * b * layer.heads / plan.tp
        return _MATH_FORWARD * scores, _MATH_BACKWARD * scores
    if plan.cp == 1:
        return 0.0, 0.0
    inner = group_sizes(plan.context, plan.cp, plan.ulysses)[0]
    has_flash = runs_flash(layer, seq_len)
    if plan.context in ("gather", "ulysses") and not has_flash:
        return _in_blocks(layer, plan, seq_len, b)
    rows = rank_tokens(plan, job)
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


def embedding_memory(shape: ModelShape, plan: Candidate, job: Job) -> float:
    """Return the bytes of the embeddings of whole rows, which a decoder's forward holds under cp until it returns."""
    return 0.0 if plan.cp == 1 else float(plan.micro_batch_size * job.seq_len * shape.hidden * job.element_bytes)


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
    run, queries = inner * local // 2, plan.micro_batch_size * local * layer.query_width / plan.tp
    scores = plan.micro_batch_size * layer.heads / plan.tp / inner * min(BLOCK, run) * run
    return _SCORES_FORWARD[b] * scores + queries * 4, _SCORES_BACKWARD[b] * scores + queries * (2 * 4 + b)


def _in_blocks(layer: LayerShape, plan: Candidate, seq_len: int, b: int) -> tuple[float, float]:
    """Return the bytes of attention over all keys by the model's own function, a block of queries at a time."""
    inner = plan.cp if plan.context == "ulysses" else 1
    padded = plan.cp * local_tokens(seq_len, plan.cp)
    whole = plan.micro_batch_size * padded
    query, keys = layer.query_width / plan.tp / inner, exchanged_keys(layer, plan) / inner
    block = min(BLOCK, padded // 2 if inner > 1 else local_tokens(seq_len, plan.cp) // 2)
    seen = padded if layer.windowed < 1 or layer.window is None else min(padded, layer.window + block)
    repeated = plan.micro_batch_size * seen * 2 * query * b if keys < query else 0.0
    scores = plan.micro_batch_size * layer.heads / plan.tp / inner * block * seen if layer.traits.keeps_scores else 0.0
    places = block * seen  # a mask is made as booleans, and then has the dtype of the scores
    gathered = whole * 2 * keys * b if inner == 1 else 0.0
    own = plan.micro_batch_size * block * query * b * 4
    forward = max(2 * gathered, gathered + repeated + (b + 2) * places + own + _SCORES_FORWARD[b] * scores)
    sums = whole * 2 * keys * 4
    at_block = sums + 2 * repeated + 2 * plan.micro_batch_size * seen * 2 * keys * b + (b + 0.5) * places
    backward = gathered + max(at_block + _SCORES_BACKWARD[b] * scores, 2 * sums if inner == 1 else 0.0)
    return forward, backward


_ROUTED = 8  # bytes that the router keeps for each token and expert: scores in 32 bits, and their softmax


@dataclass(frozen=True, kw_only=True)
class SavedByLayer:
    """The bytes that forward saves for one micro-batch in each layer of a run.

    Args:
        count: number of layers in the run.
        layer: bytes that one decoder layer saves.
        attention: bytes that the attention block of the layer saves.
        kept: bytes that one layer saves if backward recomputes the layer.
    """

    count: int
    layer: float
    attention: float
    kept: float


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The bytes that forward saves for one micro-batch.

    Args:
        runs: what the layers save, run by run.
        shared: bytes of the rotary sines and cosines, which are computed once for all layers.
        arguments: bytes of the positions and masks that are passed to recomputed layers.
        head: bytes of the last norm, the head and the loss.
        of_head: bytes of the head and the loss alone.
        towers: bytes of the towers.
    """

    runs: tuple[SavedByLayer, ...]
    shared: float
    arguments: float
    head: float
    of_head: float
    towers: float = 0.0

    def held(self, counts: Sequence[int], recomputed: int) -> list[float]:
        """Return the bytes that ``counts`` layers of each run save, of which backward recomputes the first ones."""
        found = []
        for run, count in zip(self.runs, counts, strict=True):
            again = min(count, recomputed)
            recomputed -= again
            found.append(again * run.kept + (count - again) * run.layer)
        return found

    def below(self, recomputed: int) -> list[float]:
        """Return the bytes that the layers before each layer save, and all; backward recomputes the first ones."""
        found: list[float] = [0.0]
        for run in self.runs:
            before, first = found[-1], min(run.count, recomputed)
            recomputed -= first
            counts = ((min(index, first), index) for index in range(1, run.count + 1))
            found += [before + (again * run.kept + (count - again) * run.layer) for again, count in counts]
        return found

    def total(self, recomputed: int) -> float:
        """Return the bytes that a model saves if backward recomputes its first ``recomputed`` layers."""
        held = sum(self.held([run.count for run in self.runs], recomputed)) + self.shared + self.head + self.towers
        return held + (self.arguments if recomputed else 0)


def saved_activations(shape: ModelShape, plan: Candidate, job: Job) -> Saved:
    """Return the bytes that forward saves for one micro-batch.

    The plan's dp and its ZeRO stage make no difference.

    Example:
        >>> shape = ModelShape.of(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                       vocab=32000)
        >>> saved = saved_activations(shape, Candidate(), Job(seq_len=2048, global_batch=1))
        >>> round(saved.runs[0].layer / (2048 * 4096), 2)
        45.53
    """
    b, tp, seq_len, lora = job.element_bytes, plan.tp, job.seq_len, job.lora
    tokens = local_tokens(seq_len, plan.cp)
    n = plan.micro_batch_size * tokens
    # This rank's share of the positions between blocks, after padding to a multiple of tp.
    share = -(-tokens // tp) / tokens if plan.sequence_parallel else 1.0
    of_head = saved_by_head(shape, plan, job)
    is_measured = any(run.measured for run in shape.runs)  # their masks are among what is measured
    rotated = max(run.head_dim * (4 if run.traits.rotates_in_float32 else b) for run in shape.runs)
    embedded = 0.0
    if lora is not None and plan.recompute == "full":
        # The first layer's input is a view of all tokens under sequence parallelism, a part of them under cp.
        embedded = shape.hidden * b * (plan.micro_batch_size * seq_len if plan.cp > 1 else n if plan.sp > 1 else 0.0)
    elif lora is not None and not shape.runs[0].measured:
        # Nothing before the first adapter needs a gradient, so what the first norm reads is not kept.
        embedded = -_norm(shape.runs[0], n, share, b, frozen=True)
    return Saved(
        runs=tuple(_saved_by_layer(run, plan, job, share) for run in shape.runs),
        shared=2.0 * tokens * rotated + embedded,
        # Under cp, masks are functions, and a block of a mask is made where it is needed.
        arguments=8 * tokens + (_masks(shape, n, seq_len, b) if plan.cp == 1 and not is_measured else 0),
        head=_norm(shape.runs[-1], n, share, b, frozen=lora is not None) + of_head,
        of_head=of_head,
        towers=_tower(shape.towers, plan, b, job.images) if lora is None else 0.0,
    )


def _tower(towers: TowerShape | None, plan: Candidate, b: int, images: float) -> float:
    """Return the bytes that towers save for a micro-batch; recompute of layers is also that of their layers.

    The ranks of tp and cp share several images, but the first pass runs all of them on every rank to try that.
    """
    if towers is None or towers.saved is None:
        return 0.0
    saved = towers.saved if plan.recompute == "none" else towers.kept
    return (saved[b >= 4] + towers.pixels[b >= 4]) * plan.micro_batch_size * images


def _saved_by_layer(layer: LayerShape, plan: Candidate, job: Job, share: float) -> SavedByLayer:
    traits, tp, b, lora = layer.traits, plan.tp, job.element_bytes, job.lora
    n = rank_tokens(plan, job)
    hidden = layer.hidden * share
    if layer.measured is not None:
        last, others = layer.measured.saved(measured_share(layer, plan, job), layer.hidden)
        if lora is not None:
            of_attention, of_mlp = saved_by_adapters(layer, lora, tp, b)
            last, others = last + of_mlp, others + of_attention
        return SavedByLayer(count=layer.count, layer=n * (last + others), attention=n * others, kept=n * hidden * b)
    is_frozen = lora is not None
    # Inputs of the attention's and the MLP's first projections. A frozen 16-bit projection keeps none, but sequence
    # parallelism keeps a rank's part of what it gathers.
    inputs = 2 * n * hidden * b * (keeps_inputs(lora, b) or plan.sp > 1)
    block = (traits.norms * _norm(layer, n, share, b, frozen=is_frozen) + inputs) / 2
    of_attention = _attention(layer, plan, job)
    attention = block + n * of_attention + _query_norm(layer, n, b, tp, frozen=is_frozen)
    inside = 2 * layer.mlp_inputs - (not keeps_inputs(lora, b))  # the input of the last projection is one of these
    mlp = block + n * b * (layer.ffn / tp) * inside
    if lora is not None:
        of_adapters = saved_by_adapters(layer, lora, tp, b)
        attention += n * of_adapters[0]
        mlp += n * of_adapters[1]
    if layer.experts is not None:
        rows = layer.experts.rows(n * share, plan.ep, job.expert_load)
        mlp += layer.experts.saved(rows, b) + n * share * layer.experts.count * _ROUTED
    return SavedByLayer(count=layer.count, layer=attention + mlp, attention=attention, kept=n * hidden * b)


def keeps_inputs(lora: Lora | None, b: int) -> bool:
    """Return whether what projections read is kept in the model's dtype.

    A frozen projection keeps no input, but a 32-bit adapter of a 32-bit model reads the same tensor, and the 8-bit
    kernel keeps it.
    """
    return lora is None or b >= ADAPTER_BYTES or lora.quantised == "int8"


def measured_share(layer: LayerShape, plan: Candidate, job: Job) -> RankShare:
    """Return the share that a rank has of what was measured of a layer."""
    return RankShare(
        element_bytes=job.element_bytes, length=local_tokens(job.seq_len, plan.cp), tp=plan.tp, own_tokens=1 / plan.sp,
        cuts_scores=layer.traits.keeps_scores,
    )  # fmt: skip


def _norm(layer: LayerShape, n: int, share: float, b: int, *, frozen: bool = False) -> float:
    """Return the bytes that a norm saves: its input in 32 bits, a number per position, and what its weight scales."""
    scaled = 0 if frozen else 4 if layer.traits.norms_in_float32 else b
    norm = n * (layer.hidden * share * (4 + scaled) + 4 * share)
    return norm + (4 * layer.hidden if layer.traits.norm_copies_weight else 0)


def _is_masked(layer: LayerShape, seq_len: int) -> bool:
    """Return whether a window needs a mask; with a mask, the fused kernel needs a key and value head per query head."""
    return layer.window is not None and layer.window < seq_len and not layer.traits.keeps_scores


def _masks(shape: ModelShape, n: int, seq_len: int, b: int) -> float:
    """Return the bytes of the masks that are passed to the layers: one for layers with a window, one for the others."""
    if shape.traits.keeps_scores:
        kinds = any(run.windowed > 0 for run in shape.runs) + any(run.windowed < 1 for run in shape.runs)
        return n * seq_len * b * kinds
    return seq_len**2 if any(_is_masked(run, seq_len) for run in shape.runs) else 0


def _attention(layer: LayerShape, plan: Candidate, job: Job) -> float:
    """Return the bytes per position that attention saves, from q, k and v to what the output projection keeps."""
    seq_len, b = job.seq_len, job.element_bytes
    keeps_input = keeps_inputs(job.lora, b)
    if plan.cp > 1:
        return _in_parts(layer, plan, seq_len, b, keeps_input=keeps_input)
    tp = plan.tp
    query, own_keys, heads = layer.query_width / tp, layer.local_kv_width(tp), layer.heads / tp
    read = query * keeps_input  # by the output projection
    if layer.traits.keeps_scores:
        # Attention saves q, k and v for every query head, capped scores, their 32-bit softmax and a cast.
        capped = b
        scores = heads * seq_len * (capped + 4 + (b if b < 4 else 0))
        return b * (3 * query + read) + scores
    if job.plain_attention and shares_keys(layer, plan, seq_len):
        # The softmax of the scores, and scaled or repeated copies of q, k and v for every query head.
        return b * (3 * query + read + heads * seq_len)
    masked = _is_masked(layer, seq_len)
    keys = query if masked and own_keys > layer.head_dim else own_keys  # a single key head is repeated without a copy
    # After a fused projection, the output projection reads a copy of attention's output. Unless v is repeated, v is a
    # view that keeps the whole projection alive.
    values = keys
    if layer.traits.fused_qkv:
        values = read + (keys if masked else query + 2 * own_keys)
    return b * (2 * query + keys + values + (seq_len if masked else 0)) + 4 * heads


def _in_parts(layer: LayerShape, plan: Candidate, seq_len: int, b: int, *, keeps_input: bool) -> float:
    """Return the bytes per position that attention saves under context parallelism."""
    inner, outer = group_sizes(plan.context, plan.cp, plan.ulysses)
    query, keys = layer.query_width / plan.tp, exchanged_keys(layer, plan)
    # Unless attention runs again in backward, it keeps its output and the logarithm of each row's sum of exponentials.
    # The output projection reads the same output, or a copy after an exchange of heads.
    is_kept = outer > 1 or runs_flash(layer, seq_len)
    output = query * is_kept + (query * keeps_input if inner > 1 or not is_kept else 0)
    # Without an exchange, the values of a fused projection are a view that keeps the whole projection alive.
    values = query + 2 * keys if layer.traits.fused_qkv and inner == 1 else keys
    return b * (query + keys + values + output) + (4 * (layer.heads / plan.tp) if is_kept else 0)


def _query_norm(layer: LayerShape, n: int, b: int, tp: int, *, frozen: bool) -> float:
    """Return the bytes that a layer's norms of q and k save."""
    traits, keys = layer.traits, layer.local_kv_width(tp)
    width, heads = layer.query_width / tp + keys, layer.heads / tp + keys / layer.head_dim
    normed = 0 if frozen else 4 if traits.norms_in_float32 else b
    if traits.query_norm == "head":
        return n * (width * (4 + normed) + 4 * heads)
    if traits.query_norm == "whole":
        if tp == 1:
            return n * (width * (4 + normed) + 8)
        # The mean of squares is reduced over tp, in several operations that each save their factors.
        return n * (width * 12 + 32) if b == 4 else n * (width * (12 + b) + 36) + 4 * width
    return 0.0
