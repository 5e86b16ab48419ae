"""Training in bfloat16 under a plan differs from one process as one process differs from itself in another order.

No tolerance is chosen: with one of two texts, a plan must be at most as far from one run of one process as the
farthest of 9 others, which differ from it in the order of sums alone (``support/summation_orders.py``). A plan whose
run were one of such orders would be farther with both in one of 100 cases; all draws have fixed seeds. ``python -m
conformance.precision`` has more orders and the other plans.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from support.summation_orders import (
    FAULTS,
    PLANS,
    Distances,
    Place,
    Run,
    adds_in_halves,
    alone,
    distances,
    farthest,
    orders,
    place_among,
    planned,
)
from support.tiers import crossings

ORDERS = 9
MASTERS = "bf16 with masters"
_ORDERS: dict[tuple[str, int, bool], list[Distances]] = {}


@functools.cache
def base(kind: str, text: int) -> Run:
    return alone(kind, text)


def orders_of(kind: str, text: int, in_halves: bool, pool: Any) -> list[Distances]:
    if (kind, text, in_halves) not in _ORDERS:
        _ORDERS[kind, text, in_halves] = pool.run(orders, kind, text, ORDERS, in_halves)[0]
    return _ORDERS[kind, text, in_halves]


def outside(kind: str, plan: dict[str, Any], fault: str | None, pool: Any) -> list[str]:
    def places(text: int) -> dict[str, Place]:
        run = pool.run(planned, kind, plan, fault, text)[0]
        return place_among(distances(run, base(kind, text), kind), orders_of(kind, text, adds_in_halves(plan), pool))

    return farthest(places)[1]


@pytest.mark.parametrize(
    ("kind", "plan"),
    crossings(
        [
            (MASTERS, "pp2 zero1"),
            (MASTERS, "dp2 zero1"),
            (MASTERS, "dp2 zero3"),
            ("autocast", "dp2 zero1"),
            (MASTERS, "tp2+sp zero1"),
            (MASTERS, "cp2 zero1"),
        ],
        but=[(MASTERS, "pp2 zero1")],
        one_in=2,
    ),
)
def test_differs_as_orders_of_summation_do(kind: str, plan: str, pool2: Any) -> None:
    assert outside(kind, PLANS[plan], None, pool2) == []


@pytest.mark.parametrize("fault", crossings(FAULTS))
def test_a_fault_is_farther_than_each_order(fault: str, pool2: Any) -> None:
    assert outside(*FAULTS[fault], pool2)
