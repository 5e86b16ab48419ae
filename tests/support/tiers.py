"""The tiers of single cases of a test; ``make test`` runs a case without a mark.

``make test-quick`` runs a case that is marked as quick. A case is a crossing, which is left to ``make test-all``, if
another case of ``make test`` fails for the same faults. Where a test has several parameters, ``make test-all`` runs so
many of the crossings that each value of each parameter has run once, and of long tests a sample of the cases.
``make test-nightly`` runs the other crossings, and single cases that take long.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest


def quick(*values: Any, id: str | None = None) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.quick)


def crossing(*values: Any, id: str | None = None) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.crossing)


def nightly(*values: Any, id: str | None = None) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.nightly)


def crossings(
    cases: Iterable[Any],
    *,
    but: Iterable[Any] = (),
    only: Iterable[Any] | None = None,
    quick: Iterable[Any] = (),
    one_in: int = 1,
) -> list[Any]:
    """Mark the cases of a test as crossings, except those that are listed, and the nightly ones.

    Args:
        cases: the values of a parameter, or tuples with a value for each of several parameters.
        but: the cases that ``make test`` runs.
        only: the crossings, where they are fewer than the cases that ``make test`` runs.
        quick: the cases that ``make test-quick`` and ``make test`` run.
        one_in: how many crossings there are for each one that ``make test-all`` runs.

    Example::

        @pytest.mark.parametrize(("family", "plan"), crossings(product(FAMILIES, PLANS), but=[("llama", "tp2")]))
    """
    cases, but, quick = list(cases), list(but), list(quick)
    only = [case for case in cases if case not in but and case not in quick] if only is None else list(only)
    stale = [case for case in (*but, *only, *quick) if case not in cases]
    assert not stale, f"these are no cases of the test: {stale}"
    rest = _nightly(cases, only, one_in)
    marks = [
        pytest.mark.nightly if case in rest
        else pytest.mark.crossing if case in only
        else pytest.mark.quick if case in quick
        else ()
        for case in cases
    ]  # fmt: skip
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case, mark in zip(cases, marks, strict=True)
    ]


def _nightly(cases: list[Any], crossings: list[Any], one_in: int) -> list[Any]:
    """Return the crossings that are not in the sample, or each of whose values occurs in another case that runs.

    They are gone through in an order without a pattern, which is the same in every process, so that the cases that run
    do not all share one value.
    """
    order = sorted(crossings, key=lambda case: zlib.crc32(repr(case).encode()))
    rest = [case for number, case in enumerate(order) if number % one_in]
    if not all(isinstance(case, tuple) for case in cases):
        return rest
    counts = Counter(value for case in cases if case not in crossings for value in enumerate(map(repr, case)))
    for case in order[::one_in]:
        values = list(enumerate(map(repr, case)))
        if all(counts[value] for value in values):
            rest.append(case)
        else:
            counts.update(values)
    return rest
