"""What is logged, in a worker process too, where pytest's caplog is not."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logged(name: str = "meshwright", level: int = logging.NOTSET) -> Iterator[list[str]]:
    """The messages of a logger and those below it, as they come.

    Args:
        name: of the logger.
        level: of the least important ones.
    """
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger(name).removeHandler(handler)
