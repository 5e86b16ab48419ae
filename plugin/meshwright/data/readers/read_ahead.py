"""A buffer of the samples that a rank has read from its lanes, with or without worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from meshwright.data.nested import received, sent
from meshwright.data.shards import Chunk, LaneReader


class ReadAhead:
    """Reads the same number of samples from each of a rank's lanes, as far as ``fill`` requests.

    Args:
        readers: the readers of the lanes.
        chunk_size: the number of samples per chunk of a lane.
        loader_options: arguments of the DataLoader whose workers read.
    """

    def __init__(self, readers: Sequence[LaneReader], chunk_size: int, loader_options: Mapping[str, Any]):
        self.error: Exception | None = None  # the error that stopped reading, which makes all ranks raise
        self._samples: dict[int, deque[Any]] = {reader.lane: deque() for reader in readers}
        self._live = set(self._samples)
        self._starts: dict[int, list[tuple[int, int]]] = {lane: [] for lane in self._samples}
        workers = min(loader_options.get("num_workers", 0), len(readers))
        rounds = _Rounds(readers, chunk_size)
        if workers:
            options = {**loader_options, "num_workers": workers, "batch_size": None, "collate_fn": sent}
            self._rounds: Iterator[list[Chunk]] = map(received, DataLoader(rounds, **options))
        else:
            self._rounds = iter(rounds)

    def fill(self, count: int) -> None:
        """Read until the buffer holds ``count`` samples of each lane, or all remaining samples of the lane."""
        try:
            while any(len(self._samples[lane]) < count for lane in self._live) and self.error is None:
                for chunk in next(self._rounds):
                    self._add(chunk)
        except Exception as error:
            self.error = error

    def first_sample(self) -> Any:
        """Return one of the samples that the buffer holds; None if it holds none."""
        return next((held[0] for held in self._samples.values() if held), None)

    def take(self, lane: int) -> Any:
        """Remove and return the next sample of a lane."""
        return self._samples[lane].popleft()

    def report(self) -> dict[int, tuple[int, bool, list[tuple[int, int]]]]:
        """Return for each lane the number of samples held, whether it has ended, and ``Chunk.starts`` of new shards."""
        starts, self._starts = self._starts, {lane: [] for lane in self._samples}
        return {lane: (len(held), lane not in self._live, starts[lane]) for lane, held in self._samples.items()}

    def close(self) -> None:
        """Release the workers."""
        self._rounds = iter(())

    def _add(self, chunk: Chunk) -> None:
        self._samples[chunk.lane].extend(chunk.samples)
        self._starts[chunk.lane].extend(chunk.starts)
        if chunk.ended:
            self._live.discard(chunk.lane)


class _Rounds(IterableDataset[Any]):
    """Yields lists with one chunk per lane until all lanes have ended. Each worker reads its share of the lanes."""

    def __init__(self, readers: Sequence[LaneReader], chunk_size: int):
        self._readers, self._chunk_size = readers, chunk_size

    def __iter__(self) -> Iterator[list[Chunk]]:
        worker = get_worker_info()
        own = self._readers[worker.id :: worker.num_workers] if worker else self._readers
        live = [reader.chunks(self._chunk_size) for reader in own]
        while live:
            chunks = [next(lane) for lane in live]
            live = [lane for lane, chunk in zip(live, chunks, strict=True) if not chunk.ended]
            yield chunks
