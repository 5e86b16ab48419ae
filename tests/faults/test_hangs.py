"""A program that hangs on one rank ends on all of them within the timeout and 5 s, with the rank and its stack named."""

import pytest

from harness.programs import run_program
from support.hangs import PLACES, TIMEOUT, hangs
from support.ending import check


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", [place for place in PLACES if place not in ("before the call", "gil", "stop")])
def test_a_program_that_hangs_ends(place, victim):
    outcomes = run_program(hangs, 2, place, victim, timeout=90.0)
    check(outcomes[victim], "kept other ranks waiting for 4 s.*so this process ends.*main thread.*hangs.py.*", within=TIMEOUT + 5)
    check(outcomes[1 - victim], rf"rank {victim}\b", within=TIMEOUT + 5)
