"""The methods of context parallelism in numbers: which ranks work together, and who holds how many tokens.

The runtime and the planner share this module, which needs no torch.

The number of tokens that the head and the loss process at once.

The positions of parameters in a flat tensor, for the runtime's buckets and the planner's estimates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal, get_args

Method = Literal["gather", "ulysses", "ring", "hybrid"]
METHODS: tuple[Method, ...] = get_args(Method)
BLOCK = 1024  # queries whose mask and scores are in memory at a time


def group_sizes(method: str, cp: int, ulysses: int | None = None) -> tuple[int, int]:
    """Return the number of ranks of cp that exchange tokens for heads, and the number of ranks in a ring.

    Example:
        >>> group_sizes("hybrid", 8, 2)
        (2, 4)
    """
    if method == "hybrid":
        assert ulysses is not None
        return ulysses, cp // ulysses
    return {"gather": (1, 1), "ulysses": (cp, 1), "ring": (1, cp)}[method]


def can_exchange(heads: int, key_heads: int, ranks: int) -> bool:
    """Return whether these numbers of heads can be exchanged over this number of ranks."""
    return heads % ranks == 0 and (key_heads % ranks == 0 or ranks % key_heads == 0)


def local_tokens(length: int, cp: int) -> int:
    """Return the number of tokens of a sequence that each rank holds: two chunks, padding included.

    Example:
        >>> local_tokens(130, 1), local_tokens(130, 4)
        (130, 34)
    """
    return length if cp == 1 else 2 * -(-length // (2 * cp))


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


ALIGNMENT = 64  # elements, which are 128 bytes in half precision: the unit in which a GPU reads memory
BUCKET_MB = 25.0  # the default size of the buckets in which gradients are reduced, in MiB
IN_FLIGHT = 4  # number of buckets that are reduced at the same time; 1 under ZeRO-3


def flat_offsets(sizes: Iterable[int]) -> list[int]:
    """Return the offset of each parameter in a flat tensor, and then the length of the tensor.

    Each parameter begins at a multiple of ``ALIGNMENT`` elements, and padding follows it if its size is no such
    multiple. Kernels that read a parameter in place can then read as many elements at once as if it were a tensor of
    its own.

    Args:
        sizes: the number of elements of each parameter.

    Example:
        >>> flat_offsets([3, 64, 65])
        [0, 64, 128, 256]
    """
    return list(accumulate((_padded(size, ALIGNMENT) for size in sizes), initial=0))


def sharded_length(sizes: Iterable[int], ranks: int) -> int:
    """Return the length of a flat tensor of which each rank gets an equal share.

    Args:
        sizes: the number of elements of each parameter.
        ranks: the number of ranks.

    Example:
        >>> sharded_length([3, 64, 65], 3)
        258
    """
    return _padded(flat_offsets(sizes)[-1], ranks)


def packed(sizes: Sequence[int], ranks: int = 1) -> tuple[list[int], int]:
    """Return :func:`flat_offsets` and :func:`sharded_length` of some parameters."""
    return flat_offsets(sizes), sharded_length(sizes, ranks)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
