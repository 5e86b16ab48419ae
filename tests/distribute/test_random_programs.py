"""A few of the random programs of ``python -m benchmarks.random_programs``, which runs hundreds."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from benchmarks.random_programs import run as running
from benchmarks.random_programs.compare import judge, largest_difference
from benchmarks.random_programs.draw import CHOICES, Program
from benchmarks.random_programs.run import Numbers, run


@pytest.mark.parametrize("seed", range(24))
def test_a_random_program_is_equal_or_told(seed: int, request: pytest.FixtureRequest) -> None:
    program = Program.drawn(seed)
    outcome = judge(program, request.getfixturevalue(f"pool{program.world_size}"))
    assert outcome.verdict in ("equal", "refused", "warned"), f"{program}\n{outcome.why}"


def run_with_a_wrong_gradient(program: Program) -> Numbers:
    """Half of each bucket turns its sign; on all ranks, since replicas that part are found without comparing."""
    from meshwright.parallel.gradient_sync import AllReduce

    start = AllReduce.start

    def start_wrong(self: AllReduce, bucket: Any, flat: Any) -> Any:
        flat[: len(flat) // 2].neg_()
        return start(self, bucket, flat)

    with mock.patch.object(AllReduce, "start", start_wrong):
        return run(program, distributed=True)


def test_a_wrong_gradient_would_be_caught(pool2: Any) -> None:
    program = Program(seed=1, plan="dp2", **{name: next(iter(choices)) for name, choices in CHOICES.items()})
    ranks = pool2.run(run_with_a_wrong_gradient, program)
    assert largest_difference(ranks, run(program, distributed=False))[0] > 1e-3


def test_what_differs_is_found() -> None:
    expected = Numbers(losses=[1.0, 2.0], said=[[1, 2]])
    assert largest_difference([Numbers(losses=[1.0, 2.0], said=[[1, 2]])], expected)[0] == 0
    assert largest_difference([Numbers(losses=[1.0, 2.1], said=[[1, 2]])], expected)[0] > 1e-2
    assert largest_difference([Numbers(losses=[1.0, float("nan")], said=[[1, 2]])], expected)[0] > 1e-2
    assert largest_difference([Numbers(losses=[1.0, 2.0], said=[[1, 3]])], expected)[0] > 1e-2


def test_drawn_programs_do_not_depend_on_the_session() -> None:
    assert Program.drawn(3) == Program.drawn(3) != Program.drawn(4)
    assert running.STEPS > running.EVENT
