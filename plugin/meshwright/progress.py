"""Shows the progress of long work: a bar on a terminal, a log line every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

_INTERVAL = 5.0  # seconds between log lines


class Progress:
    """Counts bytes, or other units; only rank 0 shows the count, between ``start`` and ``close``.

    Args:
        title: the name of the work.
        unit: the unit that is counted.
    """

    def __init__(self, title: str, unit: str = "B"):
        self.title, self.unit, self.total, self.done = title, unit, 0, 0
        self._bar: Any = None
        self._last = time.monotonic()

    def start(self, total: int) -> None:
        """Start, with ``total`` units to come."""
        self.total, self._last = total, time.monotonic()
        self._bar = _bar(self.title, total, self.unit) if _is_first() and sys.stderr.isatty() else None

    def add(self, count: int) -> None:
        """Count ``count`` more units as done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._last > _INTERVAL and _is_first():
            self._last = time.monotonic()
            if self.unit == "B":
                logger.info("%s: %.2f of %.2f GB", self.title, self.done / 1e9, self.total / 1e9)
            else:
                logger.info("%s: %d of %d %s", self.title, self.done, self.total, self.unit)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def _bar(title: str, total: int, unit: str) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:  # it comes with transformers, which this package can do without
        return None
    return tqdm(total=total, desc=title, unit=unit, unit_scale=True)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
