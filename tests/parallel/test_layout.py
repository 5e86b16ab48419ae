"""Layouts as arithmetic, without processes: every row held, cut and joined losslessly."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwright.errors import PlanError
from meshwright.layout.row_layout import RowLayout, expanded
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Axis
from meshwright.parallel.tensor_parallel.wide_norms import WideNorm
from meshwright.roles.blocks.head_layout import HeadLayout

pytestmark = pytest.mark.quick


def rows_of(layout: RowLayout, rank: int) -> torch.Tensor:
    return expanded(layout.copies(rank), torch.empty(0, dtype=torch.int64))


def join(layout: RowLayout, full: torch.Tensor) -> torch.Tensor:
    joined = torch.full_like(full, -1)
    for rank in range(len(layout.spans)):
        for target, piece in layout.pairs(joined, layout.take(full, rank), rank):
            target.copy_(piece)
    return joined


@given(size=st.integers(1, 40), ranks=st.integers(1, 9), dim=st.integers(0, 1))
def test_padded_layouts_lose_nothing_and_have_equal_shards(size: int, ranks: int, dim: int) -> None:
    layout = RowLayout.padded(size, ranks, dim)
    shape = (size, 3) if dim == 0 else (3, size)
    full = torch.arange(size * 3).view(shape)
    assert torch.equal(join(layout, full), full)
    assert {layout.take(full, rank).shape for rank in range(ranks)} == {
        layout.take(full, 0).shape
    }  # equal shards, or a gather would hang
    assert layout.local_size * ranks >= size
    held = torch.cat([rows_of(layout, rank)[: layout.real_rows(rank)] for rank in range(ranks)])
    assert held.tolist() == [1] * size


@given(parts=st.lists(st.integers(1, 5), min_size=1, max_size=4), ranks=st.integers(1, 4))
def test_each_part_of_a_fused_matrix_is_cut(parts: list[int], ranks: int) -> None:
    sizes = [part * ranks for part in parts]
    layout = RowLayout.even(sum(sizes), ranks, parts=sizes)
    full = torch.arange(sum(sizes))
    assert torch.equal(join(layout, full), full)
    pieces = full.split(sizes)
    for rank in range(ranks):
        expected = torch.cat([piece.chunk(ranks)[rank] for piece in pieces])
        assert torch.equal(layout.take(full, rank), expected)


@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 7),
    tp=st.integers(1, 3),
    ep=st.integers(1, 3),
    tokens=st.integers(1, 3),
    copied=st.booleans(),
)
def test_two_axes_cut_two_dims(rows: int, columns: int, tp: int, ep: int, tokens: int, copied: bool) -> None:
    """The shards of all ranks add up to each element times its copies; ranks with padding have zeros there.

    A flat cut gives each rank of a third axis some of the elements of the flattened shard, and their copies.
    """
    over_tp = RowLayout.replicated(rows, tp) if copied else RowLayout.padded(rows, tp)
    layouts = [
        TensorLayout(
            shape=torch.Size([rows, columns]),
            cuts=(("tp", over_tp), ("ep", RowLayout.padded(columns, ep, dim=1))),
            place={"tp": i, "ep": j},
        )
        for i in range(tp)
        for j in range(ep)
    ]
    full = torch.arange(1.0, rows * columns + 1).view(rows, columns)
    total = torch.zeros_like(full)
    for layout in layouts:
        shard = layout.take(full)
        assert shard.shape == layout.local_shape and layout.is_sharded == ((tp > 1 and not copied) or ep > 1)
        rows_of_tp = over_tp.take(full, layout.place["tp"])
        assert torch.equal(layout.over("ep").take(rows_of_tp, layout.place["ep"]), shard)
        padded = shard + (shard == 0)
        layout.zero_padding(padded)
        assert torch.equal(padded, shard)
        copies = layout.copies(shard)
        layout.add(total, shard / copies)
        sliced = layout.flattened(RowLayout.padded(shard.numel(), tokens))
        own = [dataclasses.replace(sliced, place={**layout.place, "tokens": rank}) for rank in range(tokens)]
        assert torch.equal(torch.cat([part.take(full) for part in own]), shard.flatten()[: shard.numel()])
        assert [part.local_shape for part in own] == [part.take(full).shape for part in own]
        shares = torch.cat([part.take(full) / part.copies(shard) for part in own])
        assert torch.equal(shares, (shard / copies).flatten())
    torch.testing.assert_close(total, full)  # a third of a number, three times


heads = st.tuples(st.integers(1, 6), st.integers(1, 6)).flatmap(
    lambda t: st.tuples(  # query heads, key/value heads, and a tp that divides the former
        st.just(t[0] * t[1]),
        st.just(t[1]),
        st.sampled_from([n for n in range(1, 37) if t[0] * t[1] % n == 0]),
    )
)


@given(sizes=heads)
def test_every_query_meets_its_own_key_head(sizes: tuple[int, int, int]) -> None:
    num_heads, kv_heads, tp = sizes
    layout = HeadLayout(heads=num_heads, kv_heads=kv_heads, head_dim=2, tp=tp)
    group = num_heads // kv_heads
    for rank in range(tp):
        local = layout.local_kv_heads(rank)
        assert len(local) * layout.queries_per_kv_head == layout.local_heads
        for i in range(layout.local_heads):  # what the stock code's repeat_kv does with the local heads
            assert local[i // layout.queries_per_kv_head] == (rank * layout.local_heads + i) // group
    rows = layout.kv_rows()
    copies = sum(rows_of(rows, rank).double().reciprocal().sum().item() for rank in range(tp))
    assert copies == pytest.approx(kv_heads * 2)  # each row counts once in a norm
    full = torch.arange(rows.size)
    assert torch.equal(join(rows, full), full)


def test_fused_projection_is_cut_by_kind_and_head() -> None:
    layout = HeadLayout(heads=4, kv_heads=2, head_dim=1, tp=2).fused_rows()
    assert layout.spans == (((0, 2), (4, 5), (6, 7)), ((2, 4), (5, 6), (7, 8)))


def test_one_rank_holds_every_head() -> None:
    heads = HeadLayout(heads=4, kv_heads=2, head_dim=8, tp=1)
    assert all(rows.is_replicated for rows in (heads.query_rows(), heads.kv_rows(), heads.fused_rows()))
    assert not HeadLayout(heads=4, kv_heads=2, head_dim=8, tp=2).kv_rows().is_replicated


def test_heads_that_do_not_divide_name_the_legal_sizes() -> None:
    with pytest.raises(PlanError, match=r"tp must be one of 1, 2, 3, 4, 6, 12"):
        HeadLayout(heads=12, kv_heads=4, head_dim=8, tp=5)


def test_adding_shards_sums_the_copies() -> None:
    rows = HeadLayout(heads=4, kv_heads=1, head_dim=2, tp=4).kv_rows()
    total = torch.zeros(2)
    for rank in range(4):
        TensorLayout(shape=total.shape, cuts=(("tp", rows),), place={"tp": rank}).add(total, torch.tensor([1.0, rank]))
    assert total.tolist() == [4.0, 6.0]
    assert rows.copies(0) == [(2, 4)]


@pytest.mark.parametrize(("kv_heads", "tp"), [(2, 2), (4, 2), (1, 2), (3, 2), (2, 4), (12, 3)])
def test_grouped_rows_are_what_the_stock_code_splits(kv_heads: int, tp: int) -> None:
    """For each key head its queries, its key and its value: the same view on a rank gives that rank's heads."""
    layout = HeadLayout(heads=12, kv_heads=kv_heads, head_dim=2, tp=tp)
    names = [
        [f"q{kv * (12 // kv_heads) + i}" for i in range(12 // kv_heads)] + [f"k{kv}", f"v{kv}"]
        for kv in range(kv_heads)
    ]
    full = [f"{head}.{row}" for group in names for head in group for row in range(2)]
    for rank in range(tp):
        rows = [full[i] for i in layout.grouped_rows().take(torch.arange(len(full)), rank).tolist()]
        heads = [row.removesuffix(".0") for row in rows[::2]]
        size = layout.queries_per_kv_head + 2
        groups = [heads[i : i + size] for i in range(0, len(heads), size)]
        queries = [head for group in groups for head in group[:-2]]
        assert queries == [f"q{rank * layout.local_heads + i}" for i in range(layout.local_heads)]
        assert [group[-2:] for group in groups] == [[f"k{kv}", f"v{kv}"] for kv in layout.local_kv_heads(rank)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_rows_in_four_are_what_the_stock_code_splits(tp: int) -> None:
    layout = HeadLayout(heads=16, kv_heads=16, head_dim=1, tp=tp)
    full = [f"{kind}{part * 4 + i}" for part in range(4) for kind in "qvk" for i in range(4)]
    for rank in range(tp):
        rows = [full[i] for i in layout.rows_in_four().take(torch.arange(48), rank).tolist()]
        own = layout.local_heads // 4
        parts = [rows[i : i + 3 * own] for i in range(0, len(rows), 3 * own)]
        for kind, name in enumerate("qvk"):
            heads = [head for part in parts for head in part[kind * own : (kind + 1) * own]]
            assert heads == [f"{name}{rank * layout.local_heads + i}" for i in range(layout.local_heads)]


def test_rows_in_four_need_four_heads_a_rank() -> None:
    with pytest.raises(PlanError, match=r"a multiple of 4 heads on each rank, but there are 8 heads and tp=4"):
        HeadLayout(heads=8, kv_heads=8, head_dim=2, tp=4).rows_in_four()


def test_rows_in_four_need_a_key_head_for_each_query_head() -> None:
    says = r"but there are 4 key/value heads and 8 query heads. Give the projection another role"
    with pytest.raises(PlanError, match=says):
        HeadLayout(heads=8, kv_heads=4, head_dim=2, tp=2).rows_in_four()


def test_a_norm_over_a_sharded_width_trains_after_an_evaluation_in_inference_mode() -> None:
    """The norm keeps a tensor from its first call, which backward of later calls saves."""
    norm = nn.RMSNorm(8, eps=1e-6)
    WideNorm(norm, RowLayout.even(8, 1), Axis("tp"))
    x = torch.randn(2, 8, requires_grad=True)
    with torch.inference_mode():
        evaluated = norm(x)
    norm(x).sum().backward()
    assert torch.allclose(evaluated, nn.functional.rms_norm(x, (8,), norm.weight, 1e-6)) and x.grad is not None
