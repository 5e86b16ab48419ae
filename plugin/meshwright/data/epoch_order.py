"""Orders of an epoch's samples. An order returns any range of its samples without iterating up to that range."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

IN_MEMORY = 2**20  # the most samples whose order is kept in memory: 8 MB
BLOCK = 4096  # the number of indices that a Permutation computes at a time
ROUNDS = 8


class Order(Protocol):
    """The interface of an order, which returns any contiguous range of an epoch's samples."""

    def take(self, start: int, stop: int) -> list[Any]:
        """Return the dataset indices of the epoch's samples ``start`` to ``stop - 1``."""


class InOrder:
    """The dataset's own order: sample k has index k."""

    def take(self, start: int, stop: int) -> list[int]:
        return list(range(start, stop))


class ListedOrder:
    """An order given as the sequence of indices that a sampler drew."""

    def __init__(self, indices: Sequence[Any]):
        self._indices = indices

    def take(self, start: int, stop: int) -> list[Any]:
        return list(self._indices[start:stop])


class Permuted:
    """An order held as a tensor of indices."""

    def __init__(self, indices: Tensor):
        self._indices = indices

    def take(self, start: int, stop: int) -> list[int]:
        return self._indices[start:stop].tolist()


class Permutation:
    """A seeded permutation of ``0 .. size - 1`` in constant memory. A range costs the same wherever it starts.

    The permutation is a Feistel network over the next power of four. Results of at least ``size`` are permuted again
    (cycle-walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

    Args:
        size: the number of samples in the dataset.
        seed: the text that determines the permutation.

    Example:
        >>> sorted(Permutation(5, "7").take(0, 5))
        [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, seed: str):
        self._size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)  # bits of each half of an index
        digest = hashlib.blake2b(seed.encode(), digest_size=8 * ROUNDS).digest()
        # The keys are positive and odd, so that multiplying by a key loses no bits.
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8]) >> 1 | 1 for i in range(ROUNDS)]
        self._block = (-1, torch.empty(0, dtype=torch.int64))

    def take(self, start: int, stop: int) -> list[int]:
        taken: list[int] = []
        while start < stop:
            number, first = divmod(start, BLOCK)
            last = min(BLOCK, first + stop - start)
            taken += self._indices(number)[first:last].tolist()
            start += last - first
        return taken

    def _indices(self, number: int) -> Tensor:
        if self._block[0] != number:
            places = torch.arange(number * BLOCK, min((number + 1) * BLOCK, self._size))
            indices = self._permute(places)
            while (outside := indices >= self._size).any():
                indices[outside] = self._permute(indices[outside])
            self._block = (number, indices)
        return self._block[1]

    def _permute(self, x: Tensor) -> Tensor:
        """Return the images of ``x`` in a permutation of the numbers below the next power of four."""
        mask = (1 << self._half) - 1
        left, right = x >> self._half, x & mask
        for key in self._keys:
            # int64 products wrap around. Their high bits are well mixed, since these depend on all lower bits.
            mixed = (right + (key & mask)) * key
            mixed = (mixed ^ (mixed >> 29)) * key
            left, right = right, left ^ ((mixed >> 31) & mask)
        return left << self._half | right


def shuffled(size: int, seed: int) -> Order:
    """Return the shuffled order of one epoch.

    Up to ``IN_MEMORY`` samples, torch's RandomSampler draws the same order from this seed, so a program keeps its
    batches when it becomes distributed. A larger order is computed in constant memory.
    """
    if size <= IN_MEMORY:
        return Permuted(torch.randperm(size, generator=Generator().manual_seed(seed)))
    return Permutation(size, str(seed))
