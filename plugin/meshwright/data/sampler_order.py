"""The order of the user's sampler, in a form that any rank can read from any sample on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch import Generator
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from meshwright.data.global_batches import EqualBatches, ListedBatches
from meshwright.data.shuffling import (
    GENERATOR,
    SEED,
    WORKER_SEED_FIELDS,
    Draws,
    GeneratorShuffle,
    InOrder,
    ListedOrder,
    Order,
    RandomState,
    WorkerSeeds,
    decoded,
    random_number,
    shuffled,
)
from meshwright.outside_files import Check, boolean, maybe

Batches = EqualBatches | ListedBatches

_NUMBERS_OF_PROCESSES = ("num_replicas", "num_processes", "num_ranks", "world_size")  # as libraries call it
MOST_DRAWN = 2**26  # the most indices that a user's sampler may draw for an epoch: 0.5 GB


class Sampling:
    """The orders and batches of a DataLoader over a map-style dataset.

    Only ``draw`` draws an epoch's random numbers, in the same way as a plain DataLoader. The ranks then agree on the
    first rank's numbers, and ``begin`` turns these into an order.

    Args:
        loader: the user's loader.
        seed: the seed of the shuffling; None to use the loader's generator or torch's random state.
    """

    def __init__(self, loader: DataLoader[Any], seed: int | None = None):
        self.length = len(loader.dataset)  # type: ignore[arg-type]
        self._loader = loader
        self._batch_sampler: Any = loader.batch_sampler
        self._sampler: Any = getattr(self._batch_sampler, "sampler", None)
        self.has_equal_batches = type(self._batch_sampler) is BatchSampler
        self.kind = self._kind()
        if seed is not None and self.kind == "listed":
            raise ValueError(
                f"seed={seed} applies only to DataLoader(..., shuffle=True); a {type(self._sampler).__name__} draws "
                "from a generator of its own, so seed that generator"
            )
        self._worker_seeds = WorkerSeeds.of(loader)
        generator: Generator | None = getattr(self._sampler, "generator", None) if self.kind == "shuffled" else None
        if seed is not None and self.kind == "shuffled":
            generator = Generator().manual_seed(seed)
            self._worker_seeds = WorkerSeeds(generator)
        self.generator = generator
        # None unless a generator decides the orders.
        self._shuffle = None if generator is None else GeneratorShuffle(self.length, generator, self._worker_seeds)
        self._order_seed: int | None = None  # the current epoch's seed, drawn from torch's random state
        self._drawn_from: RandomState | None = None  # the state from which the user's sampler drew the current epoch
        self._has_seed = False  # whether the workers' seed is among the numbers drawn from that state
        self._is_begun = False  # whether an epoch is under way, or was when the loaded state was saved
        self._is_loaded = False

    @property
    def batch_size(self) -> int | None:
        """The number of rows per global batch; None if the user's batch sampler makes its own batches."""
        return self._batch_sampler.batch_size if self.has_equal_batches else None

    @property
    def drop_last(self) -> bool:
        return self.has_equal_batches and self._batch_sampler.drop_last

    @property
    def seed(self) -> int | None:
        """The seed of all epochs, if there is one."""
        return self._shuffle.seed if self._shuffle else None

    @seed.setter
    def seed(self, seed: int) -> None:
        assert self._shuffle is not None
        if seed != self.seed:
            self._shuffle.seed = seed

    @property
    def is_repeatable(self) -> bool:
        """Whether the order of an epoch can be reproduced."""
        return self.kind == "sequential" or self._shuffle is not None

    @property
    def follows_torch(self) -> bool:
        """Whether torch's random state may decide the orders of later epochs."""
        return self._shuffle is None and self.kind != "sequential"

    def __len__(self) -> int:
        if self.has_equal_batches and self.kind != "listed":
            return len(self._batches(self.length))
        return len(self._batch_sampler)

    def draw(self, epoch: int, samples: int) -> Draws:
        """Draw this epoch's random numbers: a seed for the workers, and what the order needs.

        Args:
            epoch: the epoch to read.
            samples: the number of the epoch's samples that were returned already.
        """
        goes_on = self._is_loaded and samples > 0
        self._is_loaded = False
        if goes_on and self.kind != "listed":
            return self._worker_seeds.draws(samples)
        if self._shuffle:
            return self._shuffle.draw(epoch)
        if goes_on:
            return Draws(worker_seed=self._worker_seeds.go_on(samples), order=self._listed_again())
        if self.kind == "listed":
            self._drawn_from = RandomState(self._source.get_state())
            rest = self._iterated()
            before = self._source.get_state()
            worker_seed = self._worker_seeds.draw()
            self._has_seed = not torch.equal(before, self._source.get_state())
            return Draws(worker_seed=worker_seed, order=self._listed(rest))
        worker_seed = self._worker_seeds.draw()
        return Draws(worker_seed=worker_seed, order=[] if self.kind == "sequential" else [random_number(None)])

    def begin(self, numbers: list[Any], epoch: int) -> tuple[Order, Batches]:
        """Return the order and the batches of an epoch, from the numbers for its order that some rank drew."""
        self._is_begun = True
        if self.kind == "listed":
            sizes, indices = numbers[1 : 1 + numbers[0]], numbers[1 + numbers[0] :]
            batches = self._batches(len(indices)) if self.has_equal_batches else ListedBatches(sizes)
            return ListedOrder(indices), batches
        order: Order = InOrder()
        if self._shuffle:
            order = self._shuffle.begin(numbers, epoch) if numbers else self._shuffle.go_on()
        elif self.kind == "shuffled":
            if numbers:
                self._order_seed = numbers[0]
            assert self._order_seed is not None
            order = shuffled(self.length, self._order_seed)
        return order, self._batches(self.length)

    def exhaust(self) -> None:
        """Draw once more if torch's RandomSampler would.

        At the end of an epoch, a DataLoader on one device asks its sampler for an index after the last one.
        """
        if self._shuffle:
            self._shuffle.exhaust()

    def finish(self) -> None:
        """Record that the epoch was read to its end."""
        self._is_begun = False

    def state(self) -> dict[str, Any]:
        """Return the state that determines the draws of the current epoch, if one has begun, and of later epochs."""
        state = {"is_begun": self._is_begun, **self._worker_seeds.state()}
        if self._shuffle:
            state |= self._shuffle.state(is_begun=self._is_begun)
        elif self._is_begun and self.kind == "shuffled":
            state["order_seed"] = self._order_seed
        elif self._is_begun and self._drawn_from is not None:
            state |= {"drawn_from": self._drawn_from.text, "has_seed": self._has_seed}
        return state

    def fields(self, state: Mapping[str, Any]) -> tuple[dict[str, Check], dict[str, Check]]:
        """Return the checks of the entries that a state must have, and may have, to be loaded."""
        required, optional = {"is_begun": boolean}, dict(WORKER_SEED_FIELDS)
        is_begun = state.get("is_begun") is True
        if self._shuffle:
            required["generator"] = GENERATOR
            optional["generator_now"] = GENERATOR
            (required if is_begun else optional)["is_exhausted"] = boolean
        elif self.kind == "shuffled":
            (required if is_begun else optional)["order_seed"] = maybe(SEED)
        else:
            optional |= {"drawn_from": maybe(GENERATOR), "has_seed": boolean}
        return required, optional

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state that was checked, so that later draws are those of the run that saved the state."""
        self._is_begun = self._is_loaded = bool(state["is_begun"])
        self._worker_seeds.load(state)
        if self._shuffle:
            self._shuffle.load(state, is_begun=self._is_begun)
        self._order_seed, drawn_from = state.get("order_seed"), state.get("drawn_from")
        self._drawn_from = None if drawn_from is None else RandomState(decoded(drawn_from))
        self._has_seed = state.get("has_seed", False)  # not in a state of an earlier version

    def leave(self) -> None:
        """Record that the next epoch to be read is neither the current nor the loaded one."""
        self._is_begun = self._is_loaded = False

    def renew_workers(self) -> None:
        """Let the workers' next seed be drawn, as in a new DataLoader; a generator's later orders stay as they are."""
        if self._worker_seeds.generator is None:
            self._worker_seeds.forget(has_drawn=False)

    def _iterated(self) -> Iterator[Any]:
        """Return an iterator of the user's sampler.

        A DataLoader makes that of its batch sampler before it draws a seed for its workers, and a method that is no
        generator draws then. torch's BatchSampler begins its own sampler with the first batch.
        """
        return chain.from_iterable((self._sampler,)) if self.has_equal_batches else iter(self._batch_sampler)

    def _listed(self, rest: Iterator[Any]) -> list[Any]:
        """Take an epoch from the user's sampler, and return the number of batches, their sizes and the indices.

        For batches of equal size, return 0 and the indices.
        """
        if self.has_equal_batches:
            indices = list(islice(rest, MOST_DRAWN))
            self._check_drawn(len(indices))
            return [0, *indices]
        batches: list[list[Any]] = []
        drawn = 0
        for batch in rest:
            if not batch:
                raise ValueError(f"batch {len(batches)} of the {type(self._batch_sampler).__name__} is empty")
            batches.append(batch)
            drawn += len(batch)
            self._check_drawn(drawn)
        return [len(batches), *map(len, batches), *chain.from_iterable(batches)]

    def _listed_again(self) -> list[Any]:
        """Call ``_listed`` again with the generator in the state that it had before the epoch.

        torch's default generator is restored afterwards.
        """
        source = self._source
        now = source.get_state()
        if self._drawn_from is not None:
            source.set_state(self._drawn_from.state)
        try:
            rest = self._iterated()
            if self._has_seed:
                random_number(source)
            return self._listed(rest)
        finally:
            if source is torch.default_generator:
                source.set_state(now)

    @property
    def _source(self) -> Generator:
        """The generator that the user's sampler draws from, unless the sampler uses randomness outside torch."""
        generator = getattr(self._sampler, "generator", None) or getattr(self._batch_sampler, "generator", None)
        return generator if isinstance(generator, Generator) else torch.default_generator

    def _batches(self, samples: int) -> EqualBatches:
        return EqualBatches(samples, self._batch_sampler.batch_size, self._batch_sampler.drop_last)

    def _kind(self) -> str:
        is_in_order = self.has_equal_batches and type(self._sampler) is SequentialSampler
        if is_in_order and len(self._sampler) == self.length:
            return "sequential"
        is_shuffle = self.has_equal_batches and type(self._sampler) is RandomSampler
        if is_shuffle and not self._sampler.replacement and self._sampler.num_samples == self.length:
            return "shuffled"
        return "listed"

    def _check_drawn(self, count: int) -> None:
        if count >= MOST_DRAWN:
            raise ValueError(
                f"a {type(self._batch_sampler).__name__} has drawn {count} samples for one epoch, and has not ended; "
                "the loader needs to know the whole epoch, so use a sampler that ends"
            )


# Classes that say how many processes the program has, and split nothing.
_OF_THE_PROGRAM = ("Namespace", "PartialState", "AcceleratorState", "TrainingArguments")


def split_by(loader: Iterable[object]) -> str | None:
    """Return what gives each process a part of a loader's dataset; None if nothing in the loader counts processes.

    The count may be an attribute of the dataset or its sampler, of what these hold, or of a dataset that is wrapped.
    """
    batch_sampler: object = getattr(loader, "batch_sampler", None)
    parts: list[Any] = [getattr(loader, "dataset", None), getattr(batch_sampler, "sampler", None), batch_sampler]
    for part in parts:
        held = getattr(part, "__dict__", {})
        inside = {name: value for name, value in held.items() if type(value).__name__ not in _OF_THE_PROGRAM}
        holders = {"": held} | {f"{name}.": getattr(value, "__dict__", {}) for name, value in inside.items()}
        for prefix, holder in holders.items():
            for name in _NUMBERS_OF_PROCESSES:
                if type(count := holder.get(name)) is int and count > 1:
                    return f"a {type(part).__name__} with {prefix}{name}={count}"
        if (inner := held.get("dataset")) is not None and not any(inner is other for other in parts):
            parts.append(inner)
    return None
