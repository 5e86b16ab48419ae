"""The orders of an epoch's samples, and the random numbers that torch's DataLoader and RandomSampler draw for them.

An order returns any range of its samples without iterating up to that range.
"""

from __future__ import annotations

import base64
import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader

from meshwright.errors import CheckpointError
from meshwright.outside_files import Check, boolean, integer, maybe, that

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


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The random numbers of one epoch.

    Args:
        worker_seed: the seed of the workers; 0 for a loader that draws its own.
        order: the numbers that the order follows from; empty if it is known without them.
    """

    worker_seed: int = 0
    order: list[Any] = field(default_factory=list)


class WorkerSeeds:
    """The seeds that a DataLoader draws for its workers, in each epoch or only once if the workers persist.

    Args:
        generator: the loader's generator; None for torch's random state.
        once: whether a seed is drawn only in the first epoch.
    """

    def __init__(self, generator: Generator | None, *, once: bool = False):
        self.generator, self.once = generator, once
        self._last: int | None = None

    @staticmethod
    def of(loader: DataLoader[Any]) -> WorkerSeeds:
        """Return the worker seeds of a DataLoader."""
        return WorkerSeeds(loader.generator, once=loader.persistent_workers)

    def draw(self) -> int:
        """Return this epoch's seed."""
        if self.once and self._last is not None:
            self._last += 1
        else:
            self._last = random_number(self.generator)
        return self._last

    def go_on(self, samples: int) -> int:
        """Return a seed for the rest of an epoch that resumes after ``samples`` samples; it is drawn if none was."""
        return self.draw() if self._last is None else self._last + samples

    def draws(self, samples: int) -> Draws:
        """Return what is drawn for an epoch, of which ``samples`` samples were read before."""
        return Draws(worker_seed=self.go_on(samples) if samples else self.draw())

    def forget(self, *, has_drawn: bool) -> None:
        """Reset to the state before the first epoch or, with ``has_drawn``, before a later epoch."""
        self._last = 0 if has_drawn else None

    def state(self) -> dict[str, Any]:
        return {"worker_seed": self._last, "persistent_workers": self.once}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state. Later seeds are those of the run that saved it, whether or not its workers persisted."""
        self._last, self.once = state.get("worker_seed"), bool(state.get("persistent_workers"))


class GeneratorShuffle:
    """The orders that a RandomSampler draws from a generator.

    Each draw leaves the generator in the state in which RandomSampler would leave it.

    Args:
        size: the number of samples in the dataset.
        generator: the sampler's generator.
        worker_seeds: the worker seeds, drawn from the same generator or from another one.
    """

    def __init__(self, size: int, generator: Generator, worker_seeds: WorkerSeeds):
        self._size, self._generator, self._worker_seeds = size, generator, worker_seeds
        self._first: Tensor | None = None  # the generator's state before any epoch
        self._next = 0  # the epoch whose order is drawn next
        self._drawn_from: RandomState | None = None  # the generator's state before the current order was drawn
        self._left = generator.get_state()  # the generator's state after this object's last draw
        self._is_exhausted = False
        self._loaded: Order | None = None

    @property
    def seed(self) -> int | None:
        """The generator's seed; None if the generator was used before the first epoch."""
        first = self._generator.get_state() if self._first is None else self._first
        fresh = Generator()
        fresh.set_state(first)
        seed = fresh.initial_seed()
        return seed if torch.equal(fresh.manual_seed(seed).get_state(), first) else None

    @seed.setter
    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def draw(self, epoch: int) -> Draws:
        """Return the worker seed of an epoch, and the generator's state before its order."""
        if self._first is None:
            self._first = self._generator.get_state()
        if epoch != self._next:
            self._go_to(epoch)
        worker_seed = self._worker_seeds.draw()
        return Draws(worker_seed=worker_seed, order=self._generator.get_state().view(torch.int64).tolist())

    def begin(self, state: list[int], epoch: int) -> Order:
        """Return the order of an epoch, drawn from the given state of some rank's generator."""
        self._generator.set_state(torch.tensor(state, dtype=torch.int64).view(torch.uint8))
        return self._begin(epoch)

    def go_on(self) -> Order:
        """Return the order of the epoch that was loaded."""
        assert self._loaded is not None
        return self._loaded

    def exhaust(self) -> None:
        """Draw once more, as RandomSampler does when it has no more indices."""
        if not self._is_exhausted:
            self._pass()
            self._left, self._is_exhausted = self._generator.get_state(), True

    def state(self, *, is_begun: bool) -> dict[str, Any]:
        """Return the state of the current epoch, or of the next one."""
        now = self._generator.get_state()
        if not is_begun:
            return {"generator": encoded(now)}
        assert self._drawn_from is not None
        state: dict[str, Any] = {"generator": self._drawn_from.text, "is_exhausted": self._is_exhausted}
        if not torch.equal(now, self._left):  # another loader draws from the generator too
            state["generator_now"] = encoded(now)
        return state

    def load(self, state: Mapping[str, Any], *, is_begun: bool) -> None:
        if self._first is None:
            self._first = self._generator.get_state()
        self._generator.set_state(decoded(state["generator"]))
        self._next = state["epoch"]
        if is_begun:
            self._loaded = self._begin(state["epoch"])
            if state["is_exhausted"]:
                self.exhaust()
            if "generator_now" in state:
                self._generator.set_state(decoded(state["generator_now"]))

    def _begin(self, epoch: int) -> Order:
        self._drawn_from = RandomState(self._generator.get_state())
        self._next, self._is_exhausted = epoch + 1, False
        drawn = self._order()
        self._left = self._generator.get_state()
        return drawn

    def _go_to(self, epoch: int) -> None:
        """Set the generator to its state after ``epoch`` complete epochs and no other draws."""
        assert self._first is not None
        self._generator.set_state(self._first)
        seeds = self._worker_seeds
        for number in range(epoch):
            if seeds.generator is self._generator and not (seeds.once and number):
                random_number(self._generator)
            self._order()
            self._pass()
        seeds.forget(has_drawn=seeds.once and epoch > 0)

    def _order(self) -> Order:
        if self._size > IN_MEMORY:
            return Permutation(self._size, str(random_number(self._generator)))
        return Permuted(torch.randperm(self._size, generator=self._generator))

    def _pass(self) -> None:
        if self._size <= IN_MEMORY:
            torch.randperm(self._size, generator=self._generator)


@dataclass(frozen=True)
class RandomState:
    """A generator's state, which is encoded as text only on demand."""

    state: Tensor

    @cached_property
    def text(self) -> str:
        return encoded(self.state)


def random_number(generator: Generator | None) -> int:
    """Draw a seed as DataLoader and RandomSampler do."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def encoded(state: Tensor) -> str:
    """Return a generator's state as a text of 3 KB."""
    words = state.view(torch.int32).view(-1, 2)  # torch stores each 32-bit word of the Mersenne Twister in 64 bits
    parts = [zlib.compress(words[:, half].contiguous().numpy().tobytes()) for half in (0, 1)]
    return " ".join(base64.b85encode(part).decode() for part in parts)


def decoded(text: str) -> Tensor:
    """Return the generator state that ``encoded`` turned into this text.

    Raises:
        CheckpointError: the text was truncated or changed.
    """
    try:
        halves = [_unpacked(base64.b85decode(part)) for part in text.split(" ", maxsplit=2)]
        state = torch.stack([torch.frombuffer(half, dtype=torch.int32) for half in halves], dim=1).view(torch.uint8)
        check_generator_state(state.view(-1))
    except (ValueError, TypeError, AttributeError, RuntimeError, zlib.error) as error:
        raise CheckpointError(
            f"a saved generator state cannot be decoded ({error}): the text was truncated or changed; load an intact "
            "copy of the checkpoint"
        ) from error
    return state.view(-1)


def _unpacked(packed: bytes) -> bytearray:
    unpacker = zlib.decompressobj()
    unpacked = bytearray(unpacker.decompress(packed, _STATE.size // 2 + 1))  # a few bytes may unpack to gigabytes
    if len(unpacked) != _STATE.size // 2 or not unpacker.eof:
        raise ValueError("it has another length")
    return unpacked


# at::CPUGeneratorImplState: the seed; how many words are left, whether it is seeded, the next word; the words; two
# normal numbers, an unused one and whether they are valid; a normal number of half the size, and whether it is valid.
_STATE = struct.Struct("=qiiq624Q3di4xfB3x")


def check_generator_state(state: Tensor) -> None:
    """Check the state of a generator of the CPU: torch reads its words at the place that the state gives.

    Raises:
        ValueError: the state is not one that a generator can have.
    """
    if state.dtype != torch.uint8 or state.dim() != 1 or len(state) != _STATE.size:
        raise ValueError("it is not the state of a generator of the CPU")
    _, left, seeded, place, *words = _STATE.unpack(state.contiguous().numpy().tobytes())
    *normals, has_normals, normal, has_normal = words[624:]
    is_sound = (
        seeded == 1
        and ((left, place) == (1, 0) or (1 <= left <= 624 and place == 625 - left))
        and has_normals in (0, 1)
        and has_normal in (0, 1)
        and all(abs(number) <= 100 for number in (*normals, normal))  # a drawn number is never larger than 40
    )
    if not is_sound:
        raise ValueError("it has values that no generator has")


def _is_generator(text: object) -> bool:
    try:
        return isinstance(text, str) and decoded(text) is not None
    except CheckpointError:
        return False


GENERATOR: Check = that("the state of a generator", _is_generator)
SEED: Check = integer(-(2**63), 2**64 - 1)
WORKER_SEED_FIELDS: dict[str, Check] = {"worker_seed": maybe(SEED), "persistent_workers": boolean}
