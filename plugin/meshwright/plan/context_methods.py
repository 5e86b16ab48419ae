"""The methods of context parallelism in numbers: which ranks work together, and who holds how many tokens.

The runtime and the planner share this module, which needs no torch.
"""

from __future__ import annotations

METHODS = ("gather", "ulysses", "ring", "hybrid")
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
