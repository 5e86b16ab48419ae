"""The positions of parameters in a flat tensor, for the runtime's buckets and the planner's estimates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

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
