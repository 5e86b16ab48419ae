"""The memory of the head and the loss, by how many logits are in memory at once: see ``Job.logits``."""

from __future__ import annotations

from meshwright.plan.head_chunks import SUMMED_WORDS, head_chunk
from meshwright.planner.job.candidate import Candidate, Logits
from meshwright.planner.job.shapes import ModelShape


def saved_by_head(
    shape: ModelShape, plan: Candidate, tokens: int, b: int, logits: Logits, *, frozen: bool = False
) -> float:
    """Return the bytes that the head and the loss save for backward.

    Args:
        shape: the model.
        plan: the plan, whose tp cuts the vocabulary.
        tokens: the tokens of this rank's micro-batch.
        b: bytes per element of the model's dtype.
        logits: the logits that are in memory at once, as in ``Job``.
        frozen: whether the head's weight gets no gradient.

    Example:
        >>> shape = ModelShape.of(name="m", layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=1000)
        >>> [saved_by_head(shape, Candidate(tp=2), 16, 2, logits) for logits in ("chunked", "sharded", "gathered")]
        [66048, 34048, 66048]
    """
    if logits == "chunked":  # the gradients of the head's input and weight
        return (tokens + (0 if frozen else _words(shape, plan, logits))) * shape.hidden * b
    # The head's input, which a frozen head does not read again, and a softmax in 32 bits.
    return tokens * ((0 if frozen else shape.hidden * b) + 4 * _words(shape, plan, logits))


def head_peak(
    shape: ModelShape, plan: Candidate, tokens: int, b: int, *, cpu: bool, logits: Logits, frozen: bool = False
) -> float:
    """Return the bytes of the head and the loss at their peak, from the head's input on.

    Args:
        shape: the model.
        plan: the plan, whose tp cuts the vocabulary.
        tokens: the tokens of this rank's micro-batch.
        b: bytes per element of the model's dtype.
        cpu: whether the plan runs on CPU, where 16-bit products are widened before they are summed.
        logits: the logits that are in memory at once, as in ``Job``.
        frozen: whether the head's weight gets no gradient.

    Example:
        >>> shape = ModelShape.of(name="8B", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336,
        ...                       vocab=128256)
        >>> whole = 4 * 8192 * 128256  # 32-bit logits
        >>> round(head_peak(shape, Candidate(), 8192, 2, cpu=False, logits="chunked") / whole, 2)
        0.78
    """
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


def after_head(shape: ModelShape, plan: Candidate, tokens: int, b: int, logits: Logits) -> float:
    """Return the bytes that the backward of the loss needs at its peak, besides what forward saved.

    The arguments are those of ``saved_by_head``.
    """
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
