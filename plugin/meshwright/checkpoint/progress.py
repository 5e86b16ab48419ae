"""How far a long read or write has come: a bar on a terminal, a log line now and then elsewhere."""

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
    """Counts bytes; shown by rank 0 only, between ``start`` and ``close``.

    Args:
        title: what is being done.
    """

    def __init__(self, title: str):
        self.title, self.total, self.done = title, 0, 0
        self._bar: Any = None
        self._last = time.monotonic()

    def start(self, total: int) -> None:
        """Args: total: bytes to come."""
        self.total, self._last = total, time.monotonic()
        self._bar = _bar(self.title, total) if _is_first() and sys.stderr.isatty() else None

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif time.monotonic() - self._last > _INTERVAL and _is_first():
            self._last = time.monotonic()
            logger.info("%s: %.2f of %.2f GB", self.title, self.done / 1e9, self.total / 1e9)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def _bar(title: str, total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:  # it comes with transformers, which this package can do without
        return None
    return tqdm(total=total, desc=title, unit="B", unit_scale=True)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
