"""Reading a dataset that the user has split: each rank its own part, with an end that all agree on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from meshwright.data.batches import Portion
from meshwright.data.peers import communication_device
from meshwright.data.reading import VERSION, Reader, check_state
from meshwright.parallel.collectives import Axis, all_gather

logger = logging.getLogger(__name__)


class SplitReader:
    """Reads the loader as it is. The ranks tell each other at each step how many rows they have.

    Args:
        own: reads this rank's part; the axis it was given has one rank.
        dp: the ranks that hold the other parts.
        drop_last: stop all ranks where the first one's part ends.
        needs_equal_rows: whether a batch must have as many rows on each rank.
    """

    def __init__(self, own: Reader, dp: Axis, *, drop_last: bool, needs_equal_rows: bool):
        self.position = own.position
        self.dropped = 0
        self._own, self._dp = own, dp
        self._drop_last, self._needs_equal_rows = drop_last, needs_equal_rows
        self._batches = 0  # given out in this epoch
        self._skipped = 0  # of the epoch that is read next

    def __len__(self) -> int:
        return len(self._own)

    @property
    def batch_size(self) -> None:
        """Each rank's loader has its own."""

    def describe(self) -> dict[str, str]:
        return {"drop_last": str(self._drop_last)}

    def draw(self) -> list[Any]:
        return []

    def read(self, draws: list[Any]) -> Iterator[Portion]:
        self._batches, self._skipped = self._skipped, 0
        portions = islice(self._own.read(self._own.draw()), self._batches, None)
        last: Portion | None = None
        while True:
            portion = next(portions, None)
            rows = self._rows_of_all(0 if portion is None else portion.total)
            total = sum(rows)
            if total == 0 or self._must_stop(rows):
                break
            if portion is None:
                assert last is not None  # _must_stop has seen to it
                portion = Portion(last.batch, total, last.held, 0)
            last = Portion(portion.batch, total, portion.held, portion.counted)
            self._batches += 1
            yield last
        self._batches = 0
        if not self.position.is_fresh:
            self.position.finish()

    def set_epoch(self, epoch: int) -> None:
        self._skipped = self._skipped if epoch == self.position.epoch else 0
        self._own.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        entries = {"epoch": self.position.epoch, "batches": self._batches or self._skipped, "ranks": self._dp.size}
        return {"version": VERSION, "reader": "split", **entries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(
            state,
            {"reader": "split", "ranks": self._dp.size},
            "a dataset that was split by the user can only go on with the same split",
        )
        self.position.load({"epoch": state["epoch"], "samples": 0})
        self._batches, self._skipped = 0, state["batches"]

    def _rows_of_all(self, rows: int) -> list[int]:
        if self._dp.size == 1:
            return [rows]
        return all_gather(torch.tensor([rows], device=communication_device()), self._dp).tolist()

    def _must_stop(self, rows: list[int]) -> bool:
        """Whether some ranks have run dry, or have fewer rows than others, and nothing can make up for it."""
        if all(rows) and (len(set(rows)) == 1 or not self._needs_equal_rows):
            return False
        if self._drop_last:
            self.dropped = sum(rows)
            if self._dp.rank == 0:
                logger.warning("the parts are not equally long: the last batch is dropped, with %d rows", self.dropped)
            return True
        said = ", ".join(f"{count} on rank {rank} of {self._dp.name}" for rank, count in enumerate(rows))
        if self._needs_equal_rows:
            raise ValueError(
                f"step {self._batches}: the user's split gave a batch of other sizes to the ranks: {said}. A DTensor "
                "must have as many rows on each; set drop_last=True on the loaders, output='local', or pass the whole "
                "dataset without is_dataset_splitted"
            )
        if self._batches == 0:
            raise ValueError(f"the user's split left a rank without a single row: {said}")
        return False
