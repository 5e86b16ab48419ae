"""The number of tokens that the head and the loss process at once."""

from __future__ import annotations

SUMMED_WORDS = 4096  # on CPU, the number of rows of a 16-bit weight's gradient that are widened at once

_CHUNKS = 16
_FEWEST = 256  # with fewer rows, memory bandwidth limits a matrix multiplication
_MOST = 2048


def head_chunk(tokens: int, hidden: int) -> int:
    """Return the number of tokens of one chunk; the last chunk may be shorter.

    With a sixteenth of the tokens, 32-bit logits and their 16-bit copy need at most a tenth of the memory of whole
    32-bit logits. Over several chunks, 16-bit gradients of the head's weight are summed in 32 bits, which costs more
    memory than the logits of a few tokens, so a few tokens form one chunk.

    Args:
        tokens: the tokens of this rank's micro-batch.
        hidden: the width of the hidden states.

    Example:
        >>> head_chunk(8192, 4096), head_chunk(390, 256), head_chunk(100, 64)
        (512, 195, 100)
    """
    if tokens <= max(_FEWEST, hidden // 4):
        return max(1, tokens)
    largest = min(_MOST, max(_FEWEST, -(-tokens // _CHUNKS)))
    return -(-tokens // -(-tokens // largest))
