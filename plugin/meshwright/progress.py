"""Shows the progress of a long operation: a bar on a terminal, a log line every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

import torch.distributed as dist
from rich import progress
from rich.console import Console

logger = logging.getLogger(__name__)

_INTERVAL = 5.0  # seconds between log lines


class Progress:
    """Counts bytes, or other units; only rank 0 shows the count, between ``start`` and ``close``.

    Args:
        title: the name of the operation.
        unit: the unit that is counted.
    """

    def __init__(self, title: str, unit: str = "B"):
        self.title, self.unit, self.total, self.done = title, unit, 0, 0
        self._bar: progress.Progress | None = None
        self._last = time.monotonic()

    def start(self, total: int) -> None:
        """Start the display of a count up to ``total`` units."""
        self.total, self._last = total, time.monotonic()
        if is_first_rank() and sys.stderr.isatty():
            self._bar = _bar(self.unit)
            self._task = self._bar.add_task(self.title, total=total)
            self._bar.start()

    def add(self, count: int) -> None:
        """Count ``count`` more units as done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(self._task, advance=count)
        elif time.monotonic() - self._last > _INTERVAL and is_first_rank():
            self._last = time.monotonic()
            if self.unit == "B":
                logger.info("%s: %.2f of %.2f GB", self.title, self.done / 1e9, self.total / 1e9)
            else:
                logger.info("%s: %d of %d %s", self.title, self.done, self.total, self.unit)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def _bar(unit: str) -> progress.Progress:
    done = progress.DownloadColumn() if unit == "B" else progress.MofNCompleteColumn()
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), done, progress.TimeRemainingColumn())
    return progress.Progress(*columns, console=Console(stderr=True))


def is_first_rank() -> bool:
    """Return whether this process is the one that speaks for all ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0
