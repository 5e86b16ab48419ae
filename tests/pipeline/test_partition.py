"""The partition of layers onto stages, against all partitions of small models."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.plan.partition import balanced_stages, check_stages, even_stages


def loads(costs, counts, first, last):
    ends = [0, *itertools.accumulate(counts)]
    sums = [sum(costs[start:end]) for start, end in itertools.pairwise(ends)]
    return [value + first * (i == 0) + last * (i == len(sums) - 1) for i, value in enumerate(sums)]


@given(
    costs=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5]), min_size=1, max_size=9),
    ends=st.tuples(st.floats(0, 4), st.floats(0, 4)),
    data=st.data(),
)
def test_no_partition_has_a_faster_slowest_stage(costs, ends, data):
    stages = data.draw(st.integers(1, len(costs)))
    counts = balanced_stages(costs, stages, first=ends[0], last=ends[1])
    assert check_stages(counts, len(costs), stages) == counts
    every = [
        loads(costs, [end - start for start, end in itertools.pairwise([0, *cuts, len(costs)])], *ends)
        for cuts in itertools.combinations(range(1, len(costs)), stages - 1)
    ]
    slowest = min(map(max, every)) * (1 + 1e-9)
    chosen = loads(costs, counts, *ends)
    assert max(chosen) <= slowest
    even = min(sum(value**2 for value in each) for each in every if max(each) <= slowest)
    assert sum(value**2 for value in chosen) == pytest.approx(even, rel=1e-6)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"), [(8, 4, (2, 2, 2, 2)), (7, 4, (2, 2, 2, 1)), (6, 4, (1, 2, 2, 1))]
)
def test_layers_are_dealt_evenly_with_light_ends(layers, stages, counts):
    assert even_stages(layers, stages) == counts


@pytest.mark.parametrize("first", [0.3, 1.0, 2.5, 9.0])
@pytest.mark.parametrize("least", [1, 3])
def test_a_loaded_first_stage_has_fewer_layers_but_never_too_few(first, least):
    for layers, stages in itertools.product(range(6, 20), range(2, 4)):
        counts = even_stages(layers, stages, first=first, least=least)
        assert sum(counts) == layers and counts[0] >= least
        others = range(least, layers - stages + 2)
        assert max(loads([1] * layers, counts, first, 0)) == min(
            max(count + first, -(-(layers - count) // (stages - 1))) for count in others
        )


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((2, 2, 2), r"stages=\(2, 2, 2\) has 3 numbers, .* make 4 stages.*stages=\(2, 2, 2, 2\)"),
        ((4, 0, 2, 2), r"stage 1 has 0 layers, but needs at least 1"),
        ((4, 2, True, 1), r"stage 2 has True layers"),
        ((2, 2, 2, 1), r"has 7 layers, but the model has 8.*stages=\(2, 2, 2, 2\)"),
    ],
)
def test_given_stages_that_do_not_fit_the_model(counts, message):
    with pytest.raises(ValueError, match=message):
        check_stages(counts, layers=8, stages=4)


def test_more_stages_than_layers():
    for make in (lambda: even_stages(3, 4), lambda: balanced_stages([1.0] * 3, 4)):
        with pytest.raises(ValueError, match=r"3 layers are fewer than the 4 stages .* pass a smaller pp"):
            make()
