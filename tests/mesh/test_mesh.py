"""ProcessMesh and ParallelDims: layouts, slicing, grids and errors; processes only for device meshes."""

import dataclasses
import doctest
import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Shard

from meshwright.mesh import process_mesh as mesh_module
from meshwright.mesh import rank_grid as rank_grid_module
from meshwright.mesh.axes import Axis, Mesh
from meshwright.mesh.process_mesh import ParallelDims, ProcessMesh

SQUARE = ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "tp"])
CUBE = ParallelDims(dp=2, cp=2, tp=2).process_mesh()


@st.composite
def rank_arrays(draw) -> np.ndarray:
    """Arrays of 1 to 4 axes that hold any unique ranks in any order."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    size = math.prod(shape)
    ranks = draw(st.lists(st.integers(0, 999), min_size=size, max_size=size, unique=True))
    return np.array(ranks).reshape(shape)


@st.composite
def parallel_dims(draw) -> ParallelDims:
    size = st.integers(1, 4)
    return ParallelDims(pp=draw(size), dp=draw(size), cp=draw(size), tp=draw(size))


@pytest.mark.parametrize("module", [mesh_module, rank_grid_module])
def test_examples_in_the_docstrings_hold(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_ranks_may_be_sequences_arrays_or_tensors(make):
    mesh = ProcessMesh(make([[3, 1], [7, 5]]))
    assert (mesh.shape, mesh.ndim, mesh.size) == ((2, 2), 2, 4)
    assert mesh.ranks == (3, 1, 7, 5)
    assert mesh.dim_names == ("d0", "d1")
    assert all(type(rank) is int for rank in mesh.ranks)


def test_writing_to_the_array_changes_no_mesh():
    SQUARE.array.fill_(9)
    assert SQUARE.array.tolist() == [[0, 1], [2, 3]]
    assert SQUARE.array.dtype == torch.int64


@given(rank_arrays())
def test_coordinate_finds_every_rank_once(array):
    mesh = ProcessMesh(array)
    coordinates = [mesh.coordinate(rank) for rank in mesh.ranks]
    assert coordinates == list(np.ndindex(array.shape))
    assert [array[coordinate] for coordinate in coordinates] == list(mesh.ranks)
    assert all(rank in mesh for rank in mesh.ranks)
    assert mesh.coordinate(1000) is None
    assert 1000 not in mesh


@given(rank_arrays())
def test_the_groups_of_an_axis_partition_the_mesh(array):
    mesh = ProcessMesh(array)
    for axis, name in enumerate(mesh.dim_names):
        groups = {mesh.axis_ranks(rank, name) for rank in mesh.ranks}
        assert sorted(itertools.chain(*groups)) == sorted(mesh.ranks)
        assert {len(group) for group in groups} == {mesh.axis_size(name)} == {array.shape[axis]}
        for rank in mesh.ranks:
            assert mesh.axis_ranks(rank, name)[mesh.coordinate(rank)[axis]] == rank


@given(rank_arrays(), st.data())
def test_slicing_equals_numpy(array, data):
    mesh = ProcessMesh(array)
    keys = data.draw(
        st.lists(st.integers(-4, 3) | st.slices(4) | st.just(slice(None)), min_size=1, max_size=array.ndim).map(tuple)
    )
    kept = [name for name, key in itertools.zip_longest(mesh.dim_names, keys) if not isinstance(key, int)]
    try:
        expected = array[keys]
    except IndexError:
        with pytest.raises(IndexError, match="is outside axis"):
            mesh[keys]
        return
    if not kept or expected.size == 0:
        with pytest.raises(ValueError, match=r"no axis|at least one axis and one rank"):
            mesh[keys]
        return
    assert np.array_equal(mesh[keys].array.numpy(), expected)
    assert mesh[keys].dim_names == tuple(kept)
    if len(keys) == 1:
        assert mesh[keys[0]] == mesh[keys]


@given(rank_arrays(), st.data())
def test_submesh_holds_the_rank_and_the_axes_in_the_order_asked(array, data):
    mesh = ProcessMesh(array)
    rank = data.draw(st.sampled_from(mesh.ranks))
    axes = data.draw(
        st.permutations(mesh.dim_names).flatmap(
            lambda names: st.integers(1, len(names)).map(lambda count: names[:count])
        )
    )
    coordinate = mesh.coordinate(rank)
    index = tuple(slice(None) if name in axes else coordinate[i] for i, name in enumerate(mesh.dim_names))
    kept = [name for name in mesh.dim_names if name in axes]
    expected = array[index].transpose([kept.index(name) for name in axes])
    assert mesh.submesh(axes, rank) == ProcessMesh(expected, axes)
    assert rank in mesh.submesh(axes, rank)


@given(rank_arrays())
def test_equal_meshes_have_equal_hashes_and_any_difference_tells(array):
    mesh = ProcessMesh(array)
    assert mesh == ProcessMesh(array.tolist())
    assert hash(mesh) == hash(ProcessMesh(array.tolist()))
    assert mesh == eval(repr(mesh))
    assert mesh != ProcessMesh(array + 1)
    assert mesh != ProcessMesh(array, [f"axis{i}" for i in range(array.ndim)])
    assert mesh != ProcessMesh(array[None])
    assert mesh != array.tolist()


@pytest.mark.parametrize(
    ("ranks", "dim_names", "message"),
    [
        ([], None, r"at least one axis and one rank, got shape \(0,\)"),
        ([[], []], None, r"got shape \(2, 0\)"),
        (3, None, r"at least one axis and one rank, got shape \(\)"),
        ([[0, 1], [2]], None, r"one shape, got \[\(1,\), \(2,\)\]"),
        ([[0, 1], 2], None, "one shape"),
        ([0, 1, 1, 0], None, r"repeated: \[0, 1\] in \[0, 1, 1, 0\]"),
        ([0, -2], None, "ranks start at 0, got -2"),
        ([0.0, 1.0], None, "a rank is an int, got 0.0"),
        ([True, False], None, "a rank is an int, got True"),
        ("01", None, "a rank is an int, got '01'"),
        ([0, None], None, "a rank is an int, got None"),
        (torch.tensor([0.5]), None, "a rank is an int, got 0.5"),
        ([[0, 1]], ["tp"], r"1 names \('tp',\) for 2 axes of shape \(1, 2\)"),
        ([[0, 1]], ["tp", "tp"], r"unique and not empty, got \('tp', 'tp'\)"),
        ([[0, 1]], ["tp", ""], "unique and not empty"),
    ],
)
def test_a_bad_mesh_is_refused(ranks, dim_names, message):
    with pytest.raises(ValueError, match=message):
        ProcessMesh(ranks, dim_names)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SQUARE["tp"], TypeError, r"use submesh\(axes, rank\) for names"),
        (lambda: SQUARE[0, 0, 0], IndexError, r"3 indices for the 2 axes \('dp', 'tp'\)"),
        (lambda: SQUARE[:, 2], IndexError, "index 2 is outside axis 'tp' of size 2"),
        (
            lambda: SQUARE.axis_size("cp"),
            ValueError,
            r"no axis 'cp' in the mesh; its axes are \('dp', 'tp'\)",
        ),
        (lambda: SQUARE.submesh("tp", 4), ValueError, r"rank 4 is not in the mesh:\n +tp=0  tp=1\ndp=0 "),
        (lambda: SQUARE.submesh(("tp", "tp"), 0), ValueError, "unique"),
    ],
)
def test_a_bad_question_names_what_is_there(call, error, message):
    with pytest.raises(error, match=message):
        call()


@given(parallel_dims())
def test_tp_is_innermost_then_cp_dp_pp(dims):
    mesh = dims.process_mesh()
    assert mesh.dim_names == ("pp", "dp", "cp", "tp")
    assert mesh.ranks == tuple(range(dims.world_size))
    assert dims.active == tuple(name for name in mesh.dim_names if mesh.axis_size(name) > 1)
    stride = 1
    for name in reversed(mesh.dim_names):
        assert mesh.axis_ranks(0, name) == tuple(range(0, mesh.axis_size(name) * stride, stride))
        stride *= mesh.axis_size(name)


@given(parallel_dims(), st.sampled_from([(2, 1), (3, 1), (1, 2), (2, 2)]))
def test_a_mesh_knows_the_place_of_every_rank(dims, shared):
    places = list(itertools.product(*map(range, dims.shape)))
    ep, etp = shared if dims.dp * dims.cp * dims.tp % (shared[0] * shared[1]) == 0 else (1, 1)
    of_experts = {axis: dataclasses.replace(dims, ep=ep, etp=etp).groups(axis) for axis in ("ep", "etp", "copies")}
    for groups in of_experts.values():
        assert sorted(itertools.chain(*groups)) == list(range(dims.world_size))
        assert all(len({places[rank][0] for rank in ranks}) == 1 for ranks in groups)  # a layer is on one stage
    tokens = dims.groups("dp", "cp")
    for rank, (pp, dp, cp, tp) in enumerate(places):
        group = next(ranks for ranks in tokens if rank in ranks)
        mesh = Mesh(
            pp=Axis("pp", dims.pp, pp),
            dp=Axis("dp", dims.dp, dp),
            cp=Axis("cp", dims.cp, cp),
            tp=Axis("tp", dims.tp, tp),
            tokens=Axis("dp", len(group), group.index(rank)),
        )
        assert mesh.index == rank and mesh.size == len(mesh.places) == dims.world_size
        assert mesh.place == {
            "pp": pp,
            "dp": dp,
            "cp": cp,
            "tp": tp,
            "tokens": group.index(rank),
            "ep": 0,
            "etp": 0,
            "ranks": group.index(rank) * dims.tp + tp,
            "copies": group.index(rank) * dims.tp + tp,
        }
        assert mesh.without_groups() == mesh
        place = dataclasses.replace(mesh, ep=Axis("ep", ep), etp=Axis("etp", etp)).place
        for axis, groups in of_experts.items():
            assert place[axis] == next(ranks.index(rank) for ranks in groups if rank in ranks)


@given(parallel_dims(), st.sets(st.sampled_from(ParallelDims.axis_names), min_size=1))
def test_groups_of_several_axes_share_the_place_on_the_others(dims, names):
    mesh, axes = dims.process_mesh(), sorted(names, key=dims.axis_names.index)
    groups = dims.groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(mesh.ranks)
    for group in groups:
        assert group == mesh.submesh(axes, group[0]).ranks


@given(parallel_dims(), st.data())
def test_the_grid_shows_every_rank_once_and_marks_one(dims, data):
    rank = data.draw(st.integers(0, dims.world_size - 1))
    cells = [cell for cell in dims.rank_grid(rank).replace(",", "").split() if "=" not in cell]
    assert f"[{rank}]" in cells
    assert [int(cell.strip("[]")) for cell in cells] == list(range(dims.world_size))
    assert str(dims.process_mesh()) == dims.rank_grid()


@pytest.mark.parametrize(
    ("dims", "rank", "grid"),
    [
        (ParallelDims(), None, "tp=0\n   0"),
        (ParallelDims(tp=4), 1, "tp=0  tp=1  tp=2  tp=3\n   0   [1]     2     3"),
        (ParallelDims(dp=2), None, "dp=0  dp=1\n   0     1"),
        (ParallelDims(dp=2, tp=2), None, "      tp=0  tp=1\ndp=0     0     1\ndp=1     2     3"),
        (
            ParallelDims(pp=2, dp=2, tp=2),
            7,
            "pp=0\n      tp=0  tp=1\ndp=0     0     1\ndp=1     2     3\n\n"
            "pp=1\n      tp=0  tp=1\ndp=0     4     5\ndp=1     6   [7]",
        ),
        (
            ParallelDims(dp=4, ep=4),
            2,
            "dp=0  dp=1  dp=2  dp=3\n   0     1   [2]     3\n\nexperts\nep=0  ep=1  ep=2  ep=3\n   0     1   [2]     3",
        ),
        (
            ParallelDims(dp=2, tp=2, ep=2, etp=2),
            0,
            "      tp=0  tp=1\ndp=0   [0]     1\ndp=1     2     3\n\n"
            "experts\n      etp=0  etp=1\nep=0    [0]      1\nep=1      2      3",
        ),
        (
            ParallelDims(pp=2, dp=2, cp=2, ep=2),
            5,
            "pp=0\n      cp=0  cp=1\ndp=0     0     1\ndp=1     2     3\n\n"
            "pp=1\n      cp=0  cp=1\ndp=0     4   [5]\ndp=1     6     7\n\n"
            "experts\n"
            "pp=0\n          ep=0  ep=1\ncopies=0     0     1\ncopies=1     2     3\n\n"
            "pp=1\n          ep=0  ep=1\ncopies=0     4   [5]\ncopies=1     6     7",
        ),
        (
            ParallelDims(dp=2, tp=20),
            9,
            "      tp=0  tp=1  tp=2  tp=3  ...  tp=9  ...  tp=16  tp=17  tp=18  tp=19\n"
            "dp=0     0     1     2     3  ...   [9]  ...     16     17     18     19\n"
            "dp=1    20    21    22    23  ...    29  ...     36     37     38     39",
        ),
    ],
)
def test_the_grid_reads_well(dims, rank, grid):
    assert dims.rank_grid(rank) == grid


def test_the_grid_of_a_large_world_stays_small():
    grid = ParallelDims(pp=64, dp=64, tp=64).rank_grid(123_456)
    assert "[123456]" in grid
    assert len(grid) < 20_000


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True, None])
@pytest.mark.parametrize("name", ParallelDims.axis_names)
def test_sizes_are_positive_ints(name, size):
    with pytest.raises(ValueError, match=f"{name} must be a positive int, got {name}={size!r}"):
        ParallelDims(**{name: size})


def test_experts_are_shared_by_a_divisor_of_a_stages_ranks():
    with pytest.raises(ValueError, match="ep=3 x etp=1 must divide dp=2 x cp=1 x tp=2"):
        ParallelDims(pp=3, dp=2, tp=2, ep=3)


@pytest.mark.parametrize(
    ("dims", "world_size", "message"),
    [
        (ParallelDims(dp=2, tp=2), 6, r"dp=2 x tp=2 = 4 ranks, but the world has 6:\n +tp=0.*set dp=3\."),
        (
            ParallelDims(dp=2, tp=2),
            3,
            r"Start 4 processes, or change pp, cp or tp so .* \(now 2\) divides 3\.",
        ),
        (
            ParallelDims(),
            2,
            r"tp=1 = 1 ranks, but the world has 2:\ntp=0\n   0\nStart 1 processes, or set dp=2\.",
        ),
    ],
)
def test_a_world_of_another_size_is_refused(dims, world_size, message):
    dims.check_world_size(dims.world_size)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        dims.check_world_size(world_size)


def test_dims_may_cover_a_part_of_the_world():
    assert ParallelDims(tp=2).process_mesh(ranks=[5, 7]).axis_ranks(7, "tp") == (5, 7)
    with pytest.raises(ValueError, match="tp=2 = 2 ranks, but 3 were given"):
        ParallelDims(tp=2).process_mesh(ranks=[5, 6, 7])


def groups_of_axes(mesh: ProcessMesh) -> tuple[object, dict[str, tuple[int, ...]]]:
    device_mesh = mesh.to_device_mesh("cpu")
    names = mesh.dim_names if dist.get_rank() in mesh else ()
    groups = {name: tuple(dist.get_process_group_ranks(device_mesh.get_group(name))) for name in names}
    return device_mesh.get_coordinate(), groups


@pytest.mark.parametrize(
    "mesh",
    [
        ProcessMesh([[0, 1], [2, 3]]),
        ProcessMesh([[0, 2], [1, 3]], ["dp", "tp"]),
        ProcessMesh([1, 3], ["tp"]),
        ProcessMesh([3, 1, 2]),
        ProcessMesh([[3, 1], [0, 2]], ["dp", "tp"]),
        ParallelDims(dp=2, tp=2).process_mesh(),
    ],
    ids=str,
)
def test_a_device_mesh_has_the_groups_of_the_mesh(pool4, mesh):
    for rank, (coordinate, groups) in enumerate(pool4.run(groups_of_axes, mesh)):
        assert (tuple(coordinate) if rank in mesh else coordinate) == mesh.coordinate(rank)
        assert groups == {name: mesh.axis_ranks(rank, name) for name in mesh.dim_names if rank in mesh}


def gather_in_order(mesh: ProcessMesh) -> tuple[list[int], bool]:
    """What torch gathers from shards that hold their index, and whether a second request made new groups."""
    device_mesh = mesh.to_device_mesh("cpu")
    index = device_mesh.get_coordinate()[0]
    gathered = DTensor.from_local(torch.tensor([index]), device_mesh, [Shard(0)]).full_tensor()
    return gathered.tolist(), ProcessMesh(mesh.ranks, mesh.dim_names).to_device_mesh("cpu") is device_mesh


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [3, 1, 0, 2]], ids=str)
def test_collectives_keep_the_order_of_the_mesh(pool4, ranks):
    assert pool4.run(gather_in_order, ProcessMesh(ranks)) == [([0, 1, 2, 3], True)] * 4


def without_order(mesh: ProcessMesh) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist, "new_group", lambda ranks, group_desc: None)  # as torch had it before 2.13
        mesh.to_device_mesh("cpu")


def build(dims: ParallelDims) -> tuple[tuple[int, ...], tuple[str, ...]]:
    device_mesh = dims.build("cpu")
    return tuple(device_mesh.shape), device_mesh.mesh_dim_names


def test_dims_build_a_mesh_of_four_named_axes(pool4):
    assert pool4.run(build, ParallelDims(dp=2, tp=2)) == [((1, 2, 1, 2), ("pp", "dp", "cp", "tp"))] * 4


@pytest.mark.parametrize(
    ("function", "argument", "message"),
    [
        (groups_of_axes, ProcessMesh([1, 4]), "rank 4 is outside the world of 4 ranks"),
        (without_order, ProcessMesh([[2, 3], [0, 1]]), "must ascend along each axis; reorder them, or use torch 2.13"),
        (build, ParallelDims(dp=3), "dp=3 = 3 ranks, but the world has 4"),
    ],
)
def test_what_cannot_become_a_device_mesh_fails_on_every_rank(pool4, function, argument, message):
    for type_name, text in pool4.run_expecting_error(function, argument):
        assert type_name == "ValueError"
        assert message in text
