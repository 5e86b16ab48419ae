"""A rank that is really killed in a save: what a load finds is the old or the new checkpoint, whole."""

from pathlib import Path

import pytest

from support.real_kills import Saves
from support.tiers import crossing


@pytest.mark.parametrize(
    ("victim", "place"),
    [crossing(0, 0.97), (0, 0.5), crossing(1, 0.4)],
    ids=["after the rename", "in rank 0's files", "in rank 1's files"],
)
def test_a_killed_save_leaves_the_old_or_the_new(victim: int, place: float, tmp_path: Path) -> None:
    """`python -m conformance.random_kills` kills at 200 such points."""
    saves = Saves(tmp_path, 2)
    problem = saves.problem(victim, int(place * saves.steps[victim]), saves_again=True)
    assert problem is None, problem
