"""Who writes which elements, and who reads them: pure arithmetic, compared with sets of positions."""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint.format.rank_state import assign_writes
from meshwright.checkpoint.one_device import whole_tensors
from meshwright.layout.row_layout import RowLayout, StridedBlock, between, numel, overlap, packed
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Axis, Mesh, Place


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


def mesh_of(pp: int = 1, dp: int = 1, tp: int = 1, at: Place | None = None) -> Mesh:
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    return Mesh(**{name: Axis(name, size, 0 if at is None else at[name]) for name, size in sizes.items()})


@st.composite
def rows_of(draw: Any, dim: int, size: int, ranks: int) -> RowLayout:
    """How the rows of a dim are sharded: evenly, fused, unevenly with padding, shared by ranks, or not at all."""
    kind = draw(st.sampled_from(["padded", "replicated", "shared", "any"]))
    if kind == "padded":
        return RowLayout.padded(size, ranks, dim)
    if kind == "replicated":
        return RowLayout.replicated(size, ranks, dim)
    if kind == "shared":  # one row for two ranks, as key heads are
        return RowLayout(dim, size, tuple(((r * size // ranks, -(-(r + 1) * size // ranks)),) for r in range(ranks)))
    owner = [draw(st.integers(0, ranks - 1)) for _ in range(size)]
    spans = tuple(tuple((row, row + 1) for row in range(size) if owner[row] == rank) for rank in range(ranks))
    return RowLayout(dim, size, spans)


@st.composite
def layouts(draw: Any, mesh: Mesh, shape: tuple[int, ...] | None = None) -> TensorLayout:
    """A tensor of up to 3 dims, cut along one dim by tp, maybe along another by dp, and maybe once more when flat."""
    shape = shape or tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    axes = draw(st.lists(st.sampled_from([("tp", mesh.tp.size), ("dp", mesh.dp.size)]), max_size=2, unique=True))
    dims = draw(st.permutations(range(len(shape))))
    cuts = tuple((axis, draw(rows_of(dim, shape[dim], size))) for (axis, size), dim in zip(axes, dims, strict=False))
    held = draw(st.sampled_from([None, (0,), (mesh.pp.size - 1,), tuple(sorted({0, mesh.pp.size - 1}))]))
    layout = TensorLayout(shape=torch.Size(shape), cuts=cuts, stages=held)
    if draw(st.booleans()) or any(axis == "dp" for axis, _ in cuts):
        return layout
    start, local, dp = draw(st.integers(0, 5)), layout.shard_shape.numel(), mesh.tokens.size
    length = -(-(start + local + draw(st.integers(0, 5))) // dp)
    return layout.flattened(RowLayout.stretches(start, local, length, dp))


def at(layout: TensorLayout, place: Place) -> TensorLayout:
    return dataclasses.replace(layout, place=place)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_blocks_have_the_positions_that_take_gives(data: Any) -> None:
    mesh = mesh_of(dp=data.draw(st.integers(1, 3)), tp=data.draw(st.integers(1, 4)))
    layout = data.draw(layouts(mesh))
    whole = torch.arange(1, layout.shape.numel() + 1).view(layout.shape)
    for place in mesh.places:
        local = at(layout, place).take(whole)
        assert local.shape == at(layout, place).local_shape
        found = {i: value - 1 for i, value in enumerate(local.flatten().tolist()) if value}
        assert positions(layout.blocks(place)) == found


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_restricting_packing_and_overlaps_are_those_of_sets(data: Any) -> None:
    mesh = mesh_of(dp=data.draw(st.integers(1, 3)), tp=data.draw(st.integers(1, 4)))
    layout = data.draw(layouts(mesh))
    part = layout.blocks(mesh.places[0])
    known = positions(part)
    start = data.draw(st.integers(0, 40))
    stop = data.draw(st.integers(start, 80))
    assert positions(between(part, start, stop)) == {k - start: v for k, v in known.items() if start <= k < stop}
    assert sorted(positions(packed(part)).values()) == sorted(known.values())
    assert sorted(positions(packed(part))) == list(range(numel(part)))
    # Another part, of a tensor of these positions: overlapping elements are found once, at their places in both.
    other = between(data.draw(layouts(mesh, layout.shape)).blocks(mesh.places[-1]), start // 4, stop)
    theirs = {whole: local for local, whole in positions(other).items()}
    assert positions(overlap(part, other)) == {k: theirs[v] for k, v in known.items() if v in theirs}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_each_element_is_written_once_and_read_by_every_rank_that_holds_it(data: Any) -> None:
    meshes = [
        mesh_of(tp=tp, dp=dp, pp=pp) for tp, dp in [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (3, 2)] for pp in (1, 3)
    ]
    mesh, new = data.draw(st.sampled_from(meshes)), data.draw(st.sampled_from(meshes))
    before = data.draw(layouts(mesh))
    written = assign_writes({"w": (torch.float32, before)}, mesh.places)
    files = [positions(share.get("w", [])) for share in written]
    assert sorted(whole for file in files for whole in file.values()) == list(range(before.shape.numel()))
    for place, file in zip(mesh.places, files, strict=True):
        assert sorted(file) == list(range(len(file)))
        assert set(file.values()) <= set(positions(before.blocks(place)).values())
    # Under another mesh, chunk by chunk.
    after = data.draw(layouts(new, before.shape))
    chunk = data.draw(st.integers(1, 9))
    for place in new.places:
        part = after.blocks(place)
        assert bool(part) <= (after.stages is None or place["pp"] in after.stages)
        read: dict[int, int] = {}
        for file, share in zip(files, written, strict=True):
            blocks = share.get("w", [])
            for start in range(0, numel(blocks), chunk):
                for local_position, in_chunk in positions(overlap(part, between(blocks, start, start + chunk))).items():
                    assert local_position not in read
                    read[local_position] = file[start + in_chunk]
        assert read == positions(part)


def test_stages_that_slice_a_tensor_differently_write_it_once() -> None:
    """ZeRO packs the parameters of each stage by themselves, and the other stage knows nothing of their slices."""
    mesh, size = mesh_of(pp=2, dp=2), 100_000

    def sliced(stages: tuple[int, ...], offset: int, place: Place) -> TensorLayout:
        layout = TensorLayout(shape=torch.Size([size]), stages=stages, place=place)
        return layout.flattened(RowLayout.stretches(offset, size, size, 2)) if layout.is_held else layout

    files = []
    for rank, place in enumerate(mesh.places):
        tensors = {"last": sliced((1,), 30_000, place), "tied": sliced((0, 1), 40_000 + 9_000 * place["pp"], place)}
        share = assign_writes({name: (torch.float32, layout) for name, layout in tensors.items()}, mesh.places)[rank]
        files.append({name: positions(blocks).values() for name, blocks in share.items()})
    for name in ("last", "tied"):
        assert sorted(whole for file in files for whole in file.get(name, ())) == list(range(size))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_first_rank_gathers_every_element(data: Any) -> None:
    """Pieces are sent to ranks with a smaller index only, so that the ranks can run one after the other."""
    sizes = {axis: data.draw(st.integers(1, 3)) for axis in ("pp", "dp", "tp")}
    mesh = mesh_of(**sizes)
    layout = data.draw(layouts(mesh))
    whole = torch.arange(1, layout.shape.numel() + 1).view(layout.shape)
    mail: defaultdict[Any, deque[torch.Tensor]] = defaultdict(deque)
    chunk = data.draw(st.integers(1, 9)) * whole.element_size()
    for place in reversed(mesh.places):
        rank, own = mesh_of(**sizes, at=place), at(layout, place)
        if not own.is_held:  # a stage does not know how another one slices its parameters
            own = dataclasses.replace(own, flat=None)

        def hop(piece: torch.Tensor, source: int, axis: Axis, rank: Mesh = rank) -> None:
            box = mail[axis.name, source, *(other.rank for other in rank.factors.values() if other is not axis)]
            box.append(piece.clone()) if axis.rank == source else piece.copy_(box.popleft())

        part = own.take(whole).flatten() if own.is_held else whole.new_empty(0)
        with mock.patch.multiple(whole_tensors, _hop=hop, _CHUNK=chunk):
            found = whole_tensors.assemble(part, own, rank)
        assert (found is not None) == rank.is_first
    assert found is not None and torch.equal(found, whole)
    assert not any(mail.values())


def test_shares_are_even() -> None:
    mesh, rows = mesh_of(dp=2, tp=2), RowLayout.even(64, 2)
    tensors = {f"w{i}": TensorLayout(shape=torch.Size([64, 512]), cuts=(("tp", rows),)) for i in range(3)}
    tensors |= {f"n{i}": TensorLayout(shape=torch.Size([512])) for i in range(8)}
    shares = assign_writes({name: (torch.float32, layout) for name, layout in tensors.items()}, mesh.places)
    loads = [sum(numel(blocks) for blocks in share.values()) for share in shares]
    assert sum(loads) == 3 * 64 * 512 + 8 * 512
    assert max(loads) / (sum(loads) / 4) < 1.05
