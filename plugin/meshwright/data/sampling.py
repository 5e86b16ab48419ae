"""What the sampler of the user's DataLoader asks for, as an order that any rank can start anywhere."""

from __future__ import annotations

import zlib
from itertools import chain, islice
from typing import Any, Literal

import torch
from torch import Generator
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from meshwright.data.batches import EqualBatches, ListedBatches
from meshwright.data.order import InOrder, Listed, Order, SeededShuffle, shuffled

Batches = EqualBatches | ListedBatches

MOST_DRAWN = 2**26  # indices of an epoch that a sampler of the user's may draw: 0.5 GB


class Sampling:
    """The orders and batches of a DataLoader over a map-style dataset.

    What an epoch draws at random is drawn by ``draw`` alone, as a plain DataLoader would draw it, so that the ranks
    can agree on the first rank's numbers before ``begin`` makes an order of them.

    Args:
        loader: the user's.
        seed: shuffle by this one, instead of the loader's generator or torch's.
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
                f"seed={seed} can only seed shuffle=True of the DataLoader; a {type(self._sampler).__name__} draws "
                "from a generator of its own"
            )
        self._seeded = self._seeded_shuffle(seed) if self.kind == "shuffled" else None
        # The generator's state, while it says the seed and no epoch is drawn.
        self._as_left = self._generator_state() if self._seeded and seed is None else None

    @property
    def batch_size(self) -> int | None:
        """Rows of a global batch; None where the user's batch sampler has batches of its own."""
        return self._batch_sampler.batch_size if self.has_equal_batches else None

    @property
    def drop_last(self) -> bool:
        return self.has_equal_batches and self._batch_sampler.drop_last

    @property
    def seed(self) -> int | None:
        """The seed of all epochs, where there is one; that of the generator, until the first epoch is drawn."""
        if self._as_left is not None and not torch.equal(self._generator_state(), self._as_left):
            self._seeded = self._seeded_shuffle(None)  # the script has seeded it since
            self._as_left = self._generator_state()
        return self._seeded[0] if self._seeded else None

    @seed.setter
    def seed(self, seed: int) -> None:
        if seed != self.seed:
            self._seeded = self._shuffle_by(seed)

    @property
    def is_repeatable(self) -> bool:
        """Whether the order of an epoch can be had again."""
        return self.kind == "sequential" or self._seeded is not None

    def __len__(self) -> int:
        if self.has_equal_batches and self.kind != "listed":
            return len(self._batches(self.length))
        return len(self._batch_sampler)

    def draw(self) -> list[Any]:
        """This epoch's random numbers: a seed for the workers, and what the order needs."""
        seed = self.seed  # before anything is drawn from the generator
        self._as_left = None
        worker_seed = _random_number(self._loader.generator)
        if self.kind == "sequential":
            return [worker_seed]
        if self.kind == "shuffled":
            return [worker_seed, _random_number(None) if seed is None else seed]
        if self.has_equal_batches:
            indices = list(islice(self._sampler, MOST_DRAWN))
            self._check_drawn(len(indices))
            return [worker_seed, 0, *indices]
        batches: list[list[Any]] = []
        drawn = 0
        for batch in self._batch_sampler:
            if not batch:
                raise ValueError(f"batch {len(batches)} of the {type(self._batch_sampler).__name__} is empty")
            batches.append(batch)
            drawn += len(batch)
            self._check_drawn(drawn)
        return [worker_seed, len(batches), *map(len, batches), *chain.from_iterable(batches)]

    def begin(self, draws: list[Any], epoch: int) -> tuple[Order, Batches]:
        """The order and the batches of an epoch, from numbers drawn on some rank."""
        if self.kind == "sequential":
            return InOrder(), self._batches(self.length)
        if self.kind == "shuffled":
            if self._seeded and draws[1] != self._seeded[0]:
                self._seeded = self._shuffle_by(draws[1])  # the first rank's
            order = self._seeded[1].of_epoch(epoch) if self._seeded else shuffled(self.length, draws[1])
            return order, self._batches(self.length)
        count = draws[1]
        sizes, indices = draws[2 : 2 + count], draws[2 + count :]
        batches = self._batches(len(indices)) if self.has_equal_batches else ListedBatches(sizes)
        return Listed(indices), batches

    def order_seed(self, draws: list[Any]) -> int | None:
        """What a state needs to know the order again: its seed, or a digest of an order that a sampler drew."""
        if self.kind == "listed":
            return zlib.crc32(repr(draws[1:]).encode())
        return draws[1] if self.kind == "shuffled" else None

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

    def _seeded_shuffle(self, seed: int | None) -> tuple[int, SeededShuffle] | None:
        generator = self._sampler.generator
        if seed is None and generator is None:
            return None
        if seed is None:
            seed = generator.initial_seed()
            if not torch.equal(generator.get_state(), Generator().manual_seed(seed).get_state()):
                seed = _random_number(generator)  # it was used before, and its state is too large to save
        return self._shuffle_by(seed)

    def _generator_state(self) -> torch.Tensor:
        return self._sampler.generator.get_state()

    def _shuffle_by(self, seed: int) -> tuple[int, SeededShuffle]:
        generator = self._sampler.generator
        draws: Literal["none", "first", "all"] = "first" if self._loader.persistent_workers else "all"
        if generator is not None and self._loader.generator is not generator:
            draws = "none"
        return seed, SeededShuffle(self.length, seed, draws=draws)

    def _check_drawn(self, count: int) -> None:
        if count >= MOST_DRAWN:
            raise ValueError(
                f"a {type(self._batch_sampler).__name__} has drawn {count} samples for one epoch, and is not at its "
                "end; the loader needs to know the whole epoch, so that a sampler must end"
            )


def split_by(loader: Any) -> str | None:
    """What in a loader shows that it reads only this rank's part of the dataset, if anything does."""
    dataset: Any = getattr(loader, "dataset", None)
    if getattr(dataset, "_distributed", None) is not None:
        return f"split_dataset_by_node(rank={dataset._distributed.rank}, world_size={dataset._distributed.world_size})"
    batch_sampler: Any = getattr(loader, "batch_sampler", None)
    samplers: list[Any] = [getattr(batch_sampler, "sampler", None), batch_sampler]
    for sampler in samplers:
        if isinstance(sampler, DistributedSampler):
            return f"a DistributedSampler(rank={sampler.rank}, num_replicas={sampler.num_replicas})"
        if getattr(sampler, "num_processes", 1) > 1:
            return f"a {type(sampler).__name__} over {sampler.num_processes} processes"
    return None


def _random_number(generator: Generator | None) -> int:
    """What DataLoader and RandomSampler draw as seeds."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))
