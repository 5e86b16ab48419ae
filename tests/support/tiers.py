"""The tiers of single cases of a test; ``make test`` runs a case without a mark.

``make test-quick`` runs a case that is marked as quick. A case is a crossing, which is left to ``make test-all``, if
another case of ``make test`` fails for the same faults.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(*values: Any, id: str | None = None) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.quick)


def crossing(*values: Any, id: str | None = None) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.crossing)


def crossings(
    cases: Iterable[Any], *, but: Iterable[Any] = (), only: Iterable[Any] | None = None, quick: Iterable[Any] = ()
) -> list[Any]:
    """Mark the cases of a test as crossings, except those that are listed.

    Args:
        cases: the values of a parameter, or tuples with a value for each of several parameters.
        but: the cases that ``make test`` runs.
        only: the crossings, where they are fewer than the cases that ``make test`` runs.
        quick: the cases that ``make test-quick`` and ``make test`` run.

    Example::

        @pytest.mark.parametrize(("family", "plan"), crossings(product(FAMILIES, PLANS), but=[("llama", "tp2")]))
    """
    cases, but, quick = list(cases), list(but), list(quick)
    only = [case for case in cases if case not in but and case not in quick] if only is None else list(only)
    stale = [case for case in (*but, *only, *quick) if case not in cases]
    assert not stale, f"these are no cases of the test: {stale}"
    marks = [pytest.mark.crossing if case in only else pytest.mark.quick if case in quick else () for case in cases]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case, mark in zip(cases, marks, strict=True)
    ]
