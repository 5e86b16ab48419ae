"""Reads a dataset that the user has split. Each rank reads its own part, and all ranks stop at the same step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from meshwright.data.global_batches import Portion
from meshwright.data.nested import digest
from meshwright.data.peers import Peers
from meshwright.data.readers.base import Position, Reader, StateForm
from meshwright.data.shuffling import Draws
from meshwright.errors import CheckpointError
from meshwright.mesh.axes import Axis

logger = logging.getLogger(__name__)
SAME_PARTS = (
    "the first batch is the same on all %d ranks, though is_dataset_splitted=True says that each has a part of its "
    "own. A dataset that is made before init_process_group may know the number of processes, but not which one this "
    "is. Then all ranks read one part, and the others are never read. Make the dataset after that call"
)


class SplitReader(Reader):
    """Reads the user's loader as it is. At each step the ranks exchange how many rows they have.

    The position counts batches, since all ranks read the same number of them. Other readers count samples.

    Args:
        own: the reader of this rank's part, on an axis of one rank.
        dp: the axis whose ranks hold the parts.
        drop_last: whether to stop all ranks as soon as one part ends.
        needs_equal_rows: whether a batch must have the same number of rows on each rank.
    """

    def __init__(self, own: Reader, dp: Axis, *, drop_last: bool, needs_equal_rows: bool):
        self.position = Position()
        self._own, self._dp = own, dp
        self._drop_last, self._needs_equal_rows = drop_last, needs_equal_rows

    def __len__(self) -> int:
        return len(self._own)

    @property
    def batch_size(self) -> int | None:
        return self._own.batch_size

    def describe(self) -> dict[str, str]:
        return {"drop_last": str(self._drop_last), "batch size": str(self.batch_size)}

    def draw(self) -> Draws:
        return Draws()

    def read(self, draws: Draws) -> Iterator[Portion]:
        self._own.position = Position(self.position.epoch, 0, is_fresh=False)
        portions = islice(self._own.read(self._own.draw()), self.position.samples, None)
        last: Portion | None = None
        while True:
            portion = next(portions, None)
            code = digest(portion.batch) if portion is not None and last is None and self._dp.size > 1 else 0
            counts = Peers((self._dp,)).gather(0 if portion is None else portion.total, code)
            if code and self._dp.rank == 0 and len({other for _, other in counts}) == 1:
                logger.warning(SAME_PARTS, self._dp.size)
            rows = [count for count, _ in counts]
            total = sum(rows)
            if total == 0 or self._must_stop(rows):
                break
            if portion is None:
                if last is None:
                    raise ValueError(f"the user's split gives some ranks no rows: {self._said(rows)}")
                portion = Portion(last.batch, total, last.held, 0, samples=last.samples)
            last = Portion(portion.batch, total, portion.held, portion.counted, samples=portion.samples)
            self.position.samples += 1
            yield last
        self.position.finish()

    def set_epoch(self, epoch: int) -> None:
        self.position.set_epoch(epoch)
        self._own.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {**self.position.state("split"), **self._settings()}

    def form_of(self, state: Mapping[str, Any]) -> StateForm:
        if state.get("samples") and not self._own.is_repeatable:
            raise CheckpointError(
                "the loader of a split dataset is shuffled without a seed, so its order cannot be restored; pass "
                "DataLoader(..., generator=GENERATOR), or the whole dataset without is_dataset_splitted"
            )
        why = "a dataset that the user has split can only be resumed with the same split and settings"
        return StateForm(equal={why: {"reader": "split", **self._settings()}})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position.load(state)
        self._own.set_epoch(self.position.epoch)

    def _settings(self) -> dict[str, Any]:
        return {"ranks": self._dp.size, "batch_size": self.batch_size}

    @property
    def is_repeatable(self) -> bool:
        return self._own.is_repeatable

    def _said(self, rows: list[int]) -> str:
        return ", ".join(f"{count} on rank {rank} of {self._dp.name}" for rank, count in enumerate(rows))

    def _must_stop(self, rows: list[int]) -> bool:
        """Return whether the epoch ends at this step, because some ranks have too few rows and ``drop_last`` is set.

        Raises:
            ValueError: the ranks' rows differ, must be equal, and ``drop_last`` is not set.
        """
        if all(rows) and (len(set(rows)) == 1 or not self._needs_equal_rows):
            return False
        if self._drop_last:
            self._dropped = sum(rows)
            if self._dp.rank == 0:
                logger.warning("the ranks' parts differ in length: drop_last drops the last %d rows", self.dropped)
            return True
        if self._needs_equal_rows:
            raise ValueError(
                f"step {self.position.samples}: the user's split gave the ranks batches of different sizes: "
                f"{self._said(rows)}. A DTensor must have the same number of rows on each rank; set drop_last=True on "
                "the loaders, use output='local', or pass the whole dataset without is_dataset_splitted"
            )
        return False
