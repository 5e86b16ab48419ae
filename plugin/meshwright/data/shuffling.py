"""What torch's DataLoader and RandomSampler draw at random, and where in those draws an epoch is."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from meshwright.data import epoch_order as order
from meshwright.data.epoch_order import Order, Permutation, Permuted


class WorkerSeeds:
    """The seed that a DataLoader draws for its workers at each epoch, or once where they persist.

    Args:
        generator: the loader's; None for torch's random state.
        once: whether only the first epoch draws.
    """

    def __init__(self, generator: Generator | None, *, once: bool = False):
        self.generator, self.once = generator, once
        self._last: int | None = None

    @staticmethod
    def of(loader: Any) -> WorkerSeeds:
        """Those of a DataLoader."""
        return WorkerSeeds(loader.generator, once=loader.persistent_workers)

    def draw(self) -> int:
        """This epoch's seed."""
        if self.once and self._last is not None:
            self._last += 1
        else:
            self._last = random_number(self.generator)
        return self._last

    def go_on(self, samples: int) -> int:
        """A seed for the rest of an epoch, whose own seed was drawn before."""
        return (self._last or 0) + samples

    def forget(self, *, has_drawn: bool) -> None:
        """Stand before an epoch: the first one, or one that the first one's draw precedes."""
        self._last = 0 if has_drawn else None

    def state(self) -> dict[str, Any]:
        return {"worker_seed": self._last, "persistent_workers": self.once}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on as the run of a state did, whether its workers persisted or not."""
        self._last, self.once = state.get("worker_seed"), bool(state.get("persistent_workers"))


class GeneratorShuffle:
    """The orders that a RandomSampler draws from a generator, which stands after each draw where it would there.

    Args:
        size: of the dataset.
        generator: the sampler's.
        worker_seeds: drawn from the same generator, or from another.
    """

    def __init__(self, size: int, generator: Generator, worker_seeds: WorkerSeeds):
        self._size, self._generator, self._worker_seeds = size, generator, worker_seeds
        self._first: Tensor | None = None  # the generator's state before any epoch
        self._next = 0  # the epoch that it draws next
        self._drawn_from: RandomState | None = None  # its state before the order of the epoch under way
        self._left = generator.get_state()  # as the last draw here left it
        self._is_exhausted = False
        self._loaded: Order | None = None

    @property
    def seed(self) -> int | None:
        """What the generator was seeded with; None if it was used before the first epoch."""
        first = self._generator.get_state() if self._first is None else self._first
        fresh = Generator()
        fresh.set_state(first)
        seed = fresh.initial_seed()
        return seed if torch.equal(fresh.manual_seed(seed).get_state(), first) else None

    @seed.setter
    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def draw(self, epoch: int) -> list[int]:
        """The worker seed of an epoch, and the generator's state before its order."""
        if self._first is None:
            self._first = self._generator.get_state()
        if epoch != self._next:
            self._go_to(epoch)
        return [self._worker_seeds.draw(), *self._generator.get_state().view(torch.int64).tolist()]

    def begin(self, state: list[int], epoch: int) -> Order:
        """The order of an epoch, drawn from a state of some rank's generator."""
        self._generator.set_state(torch.tensor(state, dtype=torch.int64).view(torch.uint8))
        return self._begin(epoch)

    def go_on(self) -> Order:
        """The order of the epoch that was loaded."""
        assert self._loaded is not None
        return self._loaded

    def exhaust(self) -> None:
        """The sampler has no more indices: RandomSampler draws once more then."""
        if not self._is_exhausted:
            self._pass(self._generator)
            self._left, self._is_exhausted = self._generator.get_state(), True

    def state(self, *, is_begun: bool) -> dict[str, Any]:
        """Of the epoch under way, or of the one that is next."""
        now = self._generator.get_state()
        if not is_begun:
            return {"generator": encoded(now)}
        assert self._drawn_from is not None
        state: dict[str, Any] = {"generator": self._drawn_from.text, "is_exhausted": self._is_exhausted}
        if not torch.equal(now, self._left):  # another loader draws from it too
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
        drawn = self._order(self._generator)
        self._left = self._generator.get_state()
        return drawn

    def _go_to(self, epoch: int) -> None:
        """Stand where whole epochs, and nothing else, lead to."""
        assert self._first is not None
        self._generator.set_state(self._first)
        seeds = self._worker_seeds
        for number in range(epoch):
            if seeds.generator is self._generator and not (seeds.once and number):
                random_number(self._generator)
            self._order(self._generator)
            self._pass(self._generator)
        seeds.forget(has_drawn=seeds.once and epoch > 0)

    def _order(self, generator: Generator) -> Order:
        if self._size > order.IN_MEMORY:
            return Permutation(self._size, str(random_number(generator)))
        return Permuted(torch.randperm(self._size, generator=generator))

    def _pass(self, generator: Generator) -> None:
        if self._size <= order.IN_MEMORY:
            torch.randperm(self._size, generator=generator)


@dataclass(frozen=True)
class RandomState:
    """A generator's state, which becomes a text only where somebody asks."""

    state: Tensor

    @cached_property
    def text(self) -> str:
        return encoded(self.state)


def random_number(generator: Generator | None) -> int:
    """What DataLoader and RandomSampler draw as seeds."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def encoded(state: Tensor) -> str:
    """A generator's state as a text of 3 KB."""
    words = state.view(torch.int32).view(-1, 2)  # torch keeps each 32 bits of the Mersenne Twister in 64
    parts = [zlib.compress(words[:, half].contiguous().numpy().tobytes()) for half in (0, 1)]
    return " ".join(base64.b85encode(part).decode() for part in parts)


def decoded(text: str) -> Tensor:
    """The state that ``encoded`` wrote.

    Raises:
        ValueError: it was cut or changed.
    """
    try:
        parts = [bytearray(zlib.decompress(base64.b85decode(part))) for part in text.split(" ")]
        return (
            torch.stack([torch.frombuffer(part, dtype=torch.int32) for part in parts], dim=1).view(torch.uint8).view(-1)
        )
    except (ValueError, TypeError, AttributeError, RuntimeError, zlib.error) as error:
        raise ValueError(f"the random state in this state cannot be read ({error}); it was cut or changed") from error
