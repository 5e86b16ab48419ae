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
    own = vars(owner)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        own.update(before)
        for name in values.keys() - before.keys():
            del own[name]  # the class's value counts again
