"""Who writes which elements, and who reads them: pure arithmetic, compared with sets of positions."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint.format.assign_writes import Held, Sizes, assign_writes, copies
from meshwright.checkpoint.one_device.blocks import StridedBlock, between, numel, overlap, packed, shard
from meshwright.layout.row_layout import RowLayout


def positions(blocks: list[StridedBlock]) -> dict[int, int]:
    """The one-device position of each position of the storage."""
    found: dict[int, int] = {}
    for block in blocks:
        for run in range(block.count):
            for i in range(block.length):
                local = block.local + run * block.local_stride + i
                assert local not in found
                found[local] = block.whole + run * block.whole_stride + i
    return found


@st.composite
def layouts(draw: Any, tp: int) -> tuple[tuple[int, ...], RowLayout]:
    """A shape and how its rows are sharded: evenly, fused, unevenly with padding, shared by ranks, or not at all."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    size = shape[dim]
    kind = draw(st.sampled_from(["padded", "replicated", "shared", "any"]))
    if kind == "padded":
        return shape, RowLayout.padded(size, tp, dim)
    if kind == "replicated":
        return shape, RowLayout.replicated(size, tp, dim)
    if kind == "shared":  # one row for two ranks, as key heads are
        return shape, RowLayout(
            dim, size, tuple(((rank * size // tp, -(-(rank + 1) * size // tp)),) for rank in range(tp))
        )
    owner = [draw(st.integers(0, tp - 1)) for _ in range(size)]
    spans = tuple(tuple((row, row + 1) for row in range(size) if owner[row] == rank) for rank in range(tp))
    return shape, RowLayout(dim, size, spans)


@st.composite
def held(draw: Any, tp: int, dp: int) -> Held:
    shape, layout = draw(layouts(tp))
    local = torch.Size(shape).numel() // layout.size * layout.local_size
    cut = None
    if draw(st.booleans()):
        start = draw(st.integers(0, 5))
        length = -(-(start + local + draw(st.integers(0, 5))) // dp)
        cut = RowLayout.stretches(start, local, length, dp)
    return Held(dtype=torch.float32, shape=shape, layout=layout, cut=cut)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_shard_has_the_positions_that_take_gives(data: Any) -> None:
    tp = data.draw(st.integers(1, 4))
    shape, layout = data.draw(layouts(tp))
    whole = torch.arange(1, torch.Size(shape).numel() + 1).view(shape)
    for rank in range(tp):
        local = layout.take(whole, rank).flatten().tolist()
        assert positions(shard(shape, layout, rank)) == {i: value - 1 for i, value in enumerate(local) if value}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_restricting_packing_and_overlaps_are_those_of_sets(data: Any) -> None:
    tp = data.draw(st.integers(1, 4))
    shape, layout = data.draw(layouts(tp))
    part = shard(shape, layout, 0)
    known = positions(part)
    start = data.draw(st.integers(0, 40))
    stop = data.draw(st.integers(start, 80))
    assert positions(between(part, start, stop)) == {k - start: v for k, v in known.items() if start <= k < stop}
    assert sorted(positions(packed(part)).values()) == sorted(known.values())
    assert sorted(positions(packed(part))) == list(range(numel(part)))
    # Another part, of a tensor of these positions: overlapping elements are found once, at their places in both.
    other = between(shard(shape, RowLayout.padded(shape[-1], 2, len(shape) - 1), 1), start // 4, stop)
    theirs = {whole: local for local, whole in positions(other).items()}
    assert positions(list(overlap(part, other))) == {k: theirs[v] for k, v in known.items() if v in theirs}


def stages(mesh: Sizes) -> Any:
    """The ranks of pp that hold a tensor: one, the first and the last as for a tied weight, or all."""
    return st.sampled_from(sorted({(0,), (mesh.pp - 1,), tuple(sorted({0, mesh.pp - 1})), tuple(range(mesh.pp))}))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_each_element_is_written_once_and_read_by_every_rank_that_holds_it(data: Any) -> None:
    meshes = [
        Sizes(tp=tp, dp=dp, pp=pp) for tp, dp in [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (3, 2)] for pp in (1, 3)
    ]
    mesh, new = data.draw(st.sampled_from(meshes)), data.draw(st.sampled_from(meshes))
    before = data.draw(held(mesh.tp, mesh.dp))
    before = dataclasses.replace(before, stages=data.draw(stages(mesh)))
    written = assign_writes({"w": before}, mesh)
    files = [positions(share.get("w", [])) for share in written]
    assert sorted(whole for file in files for whole in file.values()) == list(range(torch.Size(before.shape).numel()))
    for place, file in enumerate(files):
        assert sorted(file) == list(range(len(file)))
        assert set(file.values()) <= set(positions(before.part(mesh.place(place))).values())
    # Under another mesh, chunk by chunk.
    rows = before.shape[before.layout.dim]
    layout = RowLayout.padded(rows, new.tp, before.layout.dim)
    local = torch.Size(before.shape).numel() // rows * layout.local_size
    after = Held(
        dtype=torch.float32,
        shape=before.shape,
        layout=layout,
        cut=RowLayout.stretches(0, local, -(-local // new.dp), new.dp),
        stages=data.draw(stages(new)),
    )
    chunk = data.draw(st.integers(1, 9))
    for place in range(new.ranks):
        part = after.part(new.place(place))
        assert bool(part) <= (new.place(place).pp in after.stages)
        read: dict[int, int] = {}
        for file, share in zip(files, written, strict=True):
            blocks = share.get("w", [])
            for start in range(0, numel(blocks), chunk):
                for local_position, in_chunk in positions(
                    copies(part, blocks, start, min(start + chunk, numel(blocks)))
                ).items():
                    assert local_position not in read
                    read[local_position] = file[start + in_chunk]
        assert read == positions(part)


def test_shares_are_even() -> None:
    layout = RowLayout.even(64, 2)
    tensors = {f"w{i}": Held(dtype=torch.float32, shape=(64, 512), layout=layout) for i in range(3)}
    tensors |= {f"n{i}": Held.of(torch.float32, (512,), Sizes(dp=2, tp=2)) for i in range(8)}
    loads = [sum(numel(blocks) for blocks in share.values()) for share in assign_writes(tensors, Sizes(dp=2, tp=2))]
    assert sum(loads) == 3 * 64 * 512 + 8 * 512
    assert max(loads) / (sum(loads) / 4) < 1.05
