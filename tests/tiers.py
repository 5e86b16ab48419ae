"""Which tests belong to which tier: `make test-quick`, `make test` and `make test-all`.

A test is in the middle tier unless a pattern below says otherwise. A pattern is a file and a test function, or a test
function and its case, as `pytest` prints them, with `*` for any text. One that matches no test is an error, so that the
lists follow the tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

# Cases that differ from a case of `make test` in the family, the plan or the schedule only, and long programs whose
# parts other tests of `make test` run.
CROSSINGS: dict[str, tuple[str, ...]] = {}

# Each capability once.
QUICK: dict[str, tuple[str, ...]] = {}


def matches(name: str, patterns: Iterable[str]) -> list[str]:
    """Return the patterns that a test's name, without its file, fits."""
    # Not `[`, which stands for itself: it begins a test's case.
    return [pattern for pattern in patterns if fnmatchcase(name, pattern.replace("[", "[[]"))]
