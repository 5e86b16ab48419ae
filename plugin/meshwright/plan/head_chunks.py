"""The number of tokens that the head and the loss process at once."""

from __future__ import annotations

SUMMED_WORDS = 4096  # on CPU, the number of rows of a 16-bit weight's gradient that are widened at once

_CHUNKS = 16
_FEWEST = 256  # with fewer rows, memory bandwidth limits a matrix multiplication
_MOST = 2048
_MOST_ON_GPU = 4096


def head_chunk(tokens: int, hidden: int, *, element_bytes: int, cpu: bool, frozen: bool = False) -> int:
    """Return the number of tokens of one chunk; the last chunk may be shorter.

    On CPU, with a sixteenth of the tokens, 32-bit logits and their 16-bit copy need at most a tenth of the memory of
    whole 32-bit logits. Over several chunks, 16-bit gradients of the head's weight are summed in 32 bits, which costs
    more memory than the logits of a few tokens, so a few tokens form one chunk.

    On a GPU each chunk reads and writes these sums, which took as long as the product for about 800 tokens on an H200.
    There is no 32-bit copy of the logits, so that those of ``hidden`` tokens need no more memory than the sums' copy in
    16 bits, and those of twice as many, in one chunk, no more than the sums.

    Args:
        tokens: the tokens of this rank's micro-batch.
        hidden: the width of the hidden states.
        element_bytes: bytes per logit.
        cpu: whether the head is on a CPU.
        frozen: whether the head's weight gets no gradient.

    Example:
        >>> [head_chunk(tokens, 4096, element_bytes=2, cpu=True) for tokens in (8192, 390, 100)]
        [512, 390, 100]
        >>> [head_chunk(tokens, 4096, element_bytes=2, cpu=False) for tokens in (8192, 16384)]
        [8192, 4096]
    """
    in_sums = not cpu and element_bytes < 4 and not frozen  # whether the sums' memory is there for logits
    if tokens <= (2 * hidden if in_sums else max(_FEWEST, hidden // 4)):
        return max(1, tokens)
    most = max(_MOST_ON_GPU, hidden) if in_sums else _MOST
    largest = min(_MOST, max(_FEWEST, -(-tokens // _CHUNKS))) if cpu else most
    return -(-tokens // -(-tokens // largest))
