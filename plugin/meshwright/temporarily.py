"""Give attributes other values for the time of a context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def temporarily(owner: object, **values: object) -> Iterator[None]:
    """Give attributes of an object these values inside the context, and those of before after it.

    Example:
        >>> with temporarily(sync, _paused=True):  # doctest: +SKIP
        ...     loss.backward()
    """
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)
