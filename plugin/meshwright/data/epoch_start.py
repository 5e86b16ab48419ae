"""What an epoch of a dataset that can only be iterated began with, so that a resumed run reads it again from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from meshwright.data.common_states import FIELDS, CommonStates
from meshwright.data.shuffling import WORKER_SEED_FIELDS
from meshwright.schema import Check, record

T = TypeVar("T")

START_FIELDS: dict[str, Check] = {**WORKER_SEED_FIELDS, "start": record(FIELDS)}


@dataclass(frozen=True)
class EpochStart:
    """The random numbers with which an epoch began.

    Args:
        worker_seed: the seed of the workers; None if it is not known.
        states: the random states of the process that reads; None if they are not known.
    """

    worker_seed: int | None = None
    states: CommonStates | None = None

    @staticmethod
    def of(state: Mapping[str, Any]) -> EpochStart:
        """Return the start that a reader's state, which was checked, says; a state of an earlier version has none."""
        start = state.get("start")
        return EpochStart(state.get("worker_seed"), None if start is None else CommonStates.from_json(start))

    def state(self) -> dict[str, Any]:
        """Return the entries of a reader's state."""
        return {"worker_seed": self.worker_seed, **({} if self.states is None else {"start": self.states.json})}

    @contextmanager
    def restored(self, *, if_any: int) -> Iterator[None]:
        """Read in the states of the start, if they are known, and then go on with those of now."""
        now = CommonStates.now() if if_any and self.states is not None else None
        if now is None:
            yield
            return
        assert self.states is not None
        self.states.restore()
        try:
            yield
        finally:
            now.restore()

    def again(self, batches: Iterator[T], skipped: int) -> Iterator[T]:
        """Yield the batches after the first ``skipped``, which are read as when the epoch began."""
        with self.restored(if_any=skipped):
            for _ in islice(batches, skipped):
                pass
        yield from batches
