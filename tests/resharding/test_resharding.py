"""The plan of a transfer, without processes: complete, free of repeats, and never more than what is lacking."""

from __future__ import annotations

import doctest
import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from meshwright import ProcessMesh
from meshwright.faults import together as agreement
from meshwright.layout.row_layout import copy_blocks, numel, packed
from meshwright.resharding import layouts as layouts_module
from meshwright.resharding import move
from meshwright.resharding.layouts import Layout
from meshwright.resharding.move import plan, traffic, without_partial
from support.placements import EVERY, Case, lacking, shard_of

pytestmark = pytest.mark.quick

SHAPES = st.lists(st.integers(0, 9), min_size=3, max_size=4).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, partial: bool) -> Layout:
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    size = torch.Size(mesh_shape).numel()
    ranks = draw(st.lists(st.integers(0, 20), min_size=size, max_size=size, unique=True))
    choices = [Replicate(), Shard(0), Shard(1), Shard(2), *([Partial("sum")] if partial else [])]
    placements = draw(st.lists(st.sampled_from(choices), min_size=len(mesh_shape), max_size=len(mesh_shape)))
    return Layout(ProcessMesh(torch.tensor(ranks).view(mesh_shape)), tuple(placements))


@pytest.mark.parametrize("module", [move, agreement, layouts_module])
def test_examples_in_the_docstrings_hold(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


@given(SHAPES, layouts(partial=True))
def test_a_part_is_what_slicing_gives(shape, layout):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for rank in layout.mesh.ranks:
        part = layout.part(shape, rank)
        assert torch.equal(part.take(whole), shard_of(whole, *vars(layout).values(), rank))


@given(SHAPES, layouts(partial=False), layouts(partial=True))
def test_a_plan_fills_every_target_once_and_sends_only_what_it_lacks(shape, source, target):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = plan(shape, source, target)
    arrived: dict[int, Counter[int]] = {rank: Counter() for rank in target.mesh.ranks}
    for piece in pieces:
        held = shard_of(whole, source.mesh, source.placements, piece.source).contiguous().view(-1)
        taken = torch.full([numel(piece.blocks)], -1)
        copy_blocks(taken, held, packed(piece.blocks))
        elements = taken.tolist()
        assert elements and set(elements) <= set(held.tolist())
        arrived[piece.target].update(elements)
    for rank, counts in arrived.items():
        wanted = shard_of(whole, target.mesh, target.placements, rank).flatten().tolist()
        assert counts == (Counter(wanted) if target.has_value(rank) else Counter())
    case = Case(shape, source.mesh, source.placements, target.mesh, target.placements)
    assert traffic(pieces) == lacking(case)


def test_a_plan_takes_time_in_the_number_of_runs_and_not_in_its_square():
    """Parts that are cut along two inner dims have runs in each row. Their square would take a quarter of an hour."""
    mesh = ProcessMesh([[0, 1], [2, 3]])
    source, target = Layout(mesh, (Shard(1), Shard(2))), Layout(mesh, (Shard(2), Shard(1)))
    assert [len(piece.blocks) for piece in plan((2048, 4, 4), source, target)] == [2048] * 4


def test_replicas_share_the_sending():
    source = Layout(ProcessMesh([0, 1, 2, 3]), (Replicate(),))
    target = Layout(ProcessMesh([4, 5, 6, 7]), (Shard(0),))
    assert [(piece.source, piece.target) for piece in plan((8, 4), source, target)] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_equal_boxes_go_from_rank_to_rank():
    source = Layout(ProcessMesh([[0, 1], [2, 3]]), (Shard(0), Shard(2)))
    target = Layout(ProcessMesh([[4, 5], [6, 7]]), (Shard(0), Shard(2)))
    assert [(p.source, p.target) for p in plan((4, 3, 16), source, target)] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_placements_survive_as_one_integer():
    for placements in itertools.product(EVERY, repeat=2):
        assert layouts_module.decode(layouts_module.encode(placements), 2) == placements
    with pytest.raises(ValueError, match="up to 9 axes and 123 dims"):
        layouts_module.encode([Partial("min")] * 10)


def test_a_partial_is_reduced_to_what_moves_least():
    spread = Layout(ProcessMesh([0, 1]), (Partial("sum"),))
    elsewhere = Layout(ProcessMesh([2, 3]), (Replicate(),))
    # All of it leaves: a reduce-scatter is half an all-reduce, and what travels is the same.
    assert without_partial((8, 4), spread, elsewhere).placements == (Shard(0),)
    # It stays here, whole: a reduce-scatter would have to be gathered again.
    here = Layout(ProcessMesh([0, 1]), (Partial("max"),))
    assert without_partial((8, 4), spread, here).placements == (Replicate(),)


@given(st.lists(st.sampled_from([{"a": "1"}, {"a": "2"}, {"error": "ValueError: x"}]), min_size=2, max_size=5))
def test_a_disagreement_names_every_rank_that_matters(descriptions):
    text = agreement.disagreement(descriptions)
    failed = any("error" in description for description in descriptions)
    for rank, description in enumerate(descriptions):
        if (failed and "error" in description) or (not failed and len({str(d) for d in descriptions}) > 1):
            assert str(rank) in text
            assert all(value in text for value in description.values())
