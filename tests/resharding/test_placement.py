"""shard_tensor and reshard against one process: every pair of placements, on and across meshes, exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright import Partial, ProcessMesh, Replicate, Shard
from support.placements import Case, covering, joined, lacking, placements_of, reduced, shard_of
from support.tiers import crossing, crossings

LINE = ProcessMesh([0, 1, 2, 3])
SQUARE = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
SHAPES = [(8, 4), (7, 5), (3, 1), (2, 0)]  # even; uneven; shorter than an axis of 4; nothing at all

# Source and target: disjoint, overlapping, another shape, smaller, larger, in another order.
MESHES = [
    crossing(ProcessMesh([0, 1]), ProcessMesh([2, 3])),
    crossing(ProcessMesh([0, 1, 2]), ProcessMesh([1, 2, 3])),
    crossing(LINE, SQUARE),
    crossing(SQUARE, LINE),
    crossing(ProcessMesh([2]), LINE),
    crossing(LINE, ProcessMesh([1, 3])),
    crossing(LINE, ProcessMesh([3, 1, 0, 2])),
    (ProcessMesh([2, 0]), ProcessMesh([1, 3, 2])),
    crossing(ProcessMesh([[3, 1], [0, 2]]), ProcessMesh([[1], [2]])),
]


def gradient_placements(placements: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(Replicate() if isinstance(placement, Partial) else placement for placement in placements)


def cases(source: ProcessMesh, target: ProcessMesh, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Case]:
    pairs = itertools.product(placements_of(source.ndim), placements_of(target.ndim))
    return [Case(shape, source, old, target, new) for old, new in pairs for shape in shapes]


class CountedSends:
    """Counts the bytes that this rank hands to point-to-point sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        send = dist.batch_isend_irecv

        def counted(operations: list[dist.P2POp]) -> Any:
            sends = [operation.tensor for operation in operations if operation.op is dist.isend]
            assert all(tensor.numel() > 0 for tensor in sends)
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in sends)
            return send(operations)

        monkeypatch.setattr(dist, "batch_isend_irecv", counted)


def placed(whole: Tensor, mesh: ProcessMesh, placements: Sequence[Any]) -> DTensor:
    """This rank's part of a tensor, by torch's own constructor."""
    rank = dist.get_rank()
    local = shard_of(whole, mesh, placements, rank).contiguous() if rank in mesh else torch.empty(0, dtype=whole.dtype)
    device_mesh = mesh.to_device_mesh("cpu")
    return DTensor.from_local(local, device_mesh, placements, shape=whole.shape, stride=whole.stride())


def source_tensor(case: Case) -> DTensor:
    """A tensor whose partial axes are truly spread: no rank has the value alone."""
    coordinate = case.source.coordinate(dist.get_rank())
    whole = case.parts()[coordinate if coordinate else (0,) * case.source.ndim]
    return placed(whole.contiguous(), case.source, case.from_placements).requires_grad_()


def move_all(table: list[Case]) -> list[tuple[Tensor, Tensor, tuple[Any, ...], int]]:
    """The local value, the local gradient, its placements and the bytes sent forward, of each case."""
    results = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        sends = CountedSends(monkeypatch)
        for case in table:
            x = source_tensor(case)
            before = sends.bytes
            y = mw.reshard(x, case.target, case.to_placements)
            sent = sends.bytes - before
            assert tuple(y.placements) == case.to_placements
            assert tuple(y.shape) == case.shape
            assert y.device_mesh == case.target.to_device_mesh("cpu")
            seed = placed(case.gradient(), case.target, gradient_placements(case.to_placements))
            (grad,) = torch.autograd.grad(y, x, seed)
            results.append((y.to_local().detach(), grad.to_local(), grad.placements, sent))
    return results


def check(table: list[Case], ranks: list[list[tuple[Tensor, Tensor, tuple[Any, ...], int]]]) -> None:
    for index, case in enumerate(table):
        values, grads, placements, sent = zip(*(results[index] for results in ranks), strict=True)
        expected = reduced(case.parts(), case.from_placements)
        assert torch.equal(joined(values, case.target, case.to_placements, case.shape), expected), case
        assert set(placements) == {gradient_placements(case.from_placements)}, case
        assert torch.equal(joined(grads, case.source, placements[0], case.shape), case.gradient()), case
        for rank in range(len(ranks)):
            assert rank in case.target or values[rank].numel() == 0
            assert rank in case.source or grads[rank].numel() == 0
        # Of a partial source the bound depends on what it is reduced to, which a test of the plan looks at.
        if case.source.ranks != case.target.ranks and not any(isinstance(p, Partial) for p in case.from_placements):
            assert sum(sent) == 8 * lacking(case), case


@pytest.mark.parametrize("mesh", [crossing(LINE), ProcessMesh([3, 1, 0, 2])], ids=repr)
def test_every_pair_on_one_axis(pool4, mesh):
    table = cases(mesh, mesh)
    check(table, pool4.run(move_all, table))


@pytest.mark.parametrize(("shape", "every"), [((7, 5), None), crossing((8, 4), 5), crossing((3, 1), 7)], ids=str)
def test_pairs_on_two_axes(pool4, shape, every):
    """Each combination of three of the four placements, or a sample; nightly each of all four."""
    table = cases(SQUARE, SQUARE, [shape])
    table = table[::every] if every else covering(table)
    check(table, pool4.run(move_all, table, timeout=240))


@pytest.mark.parametrize(("source", "target"), MESHES, ids=repr)
def test_pairs_across_meshes(pool4, source, target):
    """Each pair on one axis, on two axes as above."""
    shapes = SHAPES if source.ndim + target.ndim == 2 else [(7, 5)]
    table = cases(source, target, shapes)
    table = covering(table) if source.ndim + target.ndim == 4 else table
    check(table, pool4.run(move_all, table, timeout=240))


@pytest.mark.nightly
@pytest.mark.parametrize("target", [SQUARE, ProcessMesh([[1], [2]])], ids=repr)
def test_every_pair_on_two_axes(pool4, target):
    table = cases(SQUARE, target, [(7, 5)])
    check(table, pool4.run(move_all, table, timeout=240))


def test_a_wrong_layout_would_be_seen():
    case = Case((7, 5), LINE, (Replicate(),), LINE, (Shard(0),))
    whole = reduced(case.parts(), case.from_placements)
    right = [shard_of(whole, LINE, (Shard(0),), rank) for rank in range(4)]
    assert torch.equal(joined(right, LINE, (Shard(0),), case.shape), whole)
    swapped = [right[1], right[0], *right[2:]]
    assert not torch.equal(joined(swapped, LINE, (Shard(0),), case.shape), whole)
    balanced = whole.tensor_split([1, 3, 5])
    with pytest.raises(AssertionError):
        joined(balanced, LINE, (Shard(0),), case.shape)
    with pytest.raises(AssertionError):
        joined([whole, whole, whole, whole + 1], LINE, (Replicate(),), case.shape)


def shard_table(table: list[Case]) -> list[Tensor]:
    data = [case.gradient() for case in table]
    tensors = [mw.shard_tensor(each, case.target, case.to_placements) for each, case in zip(data, table, strict=True)]
    locals_ = [tensor.to_local() for tensor in tensors]
    for each in data:
        each.fill_(0)  # the parts are copies
    return locals_


@pytest.mark.parametrize("mesh", [SQUARE, ProcessMesh([3, 0, 1]), ProcessMesh([2])], ids=repr)
def test_shard_tensor_places_a_full_tensor(pool4, mesh):
    table = [Case(shape, mesh, (), mesh, placements) for shape in SHAPES for placements in placements_of(mesh.ndim)]
    ranks = pool4.run(shard_table, table)
    for index, case in enumerate(table):
        assert torch.equal(
            joined([results[index] for results in ranks], mesh, case.to_placements, case.shape), case.gradient()
        )


def shard_many_kinds() -> None:
    mesh = ProcessMesh([1, 0])
    inside = dist.get_rank() in mesh
    rows = mw.shard_tensor([[1, 2, 3], [4, 5, 6]], mesh, [Shard(-2)])
    assert rows.dtype == torch.int64 and rows.placements == (Shard(0),) and rows.shape == (2, 3)
    assert rows.to_local().tolist() == ([[[4, 5, 6]], [[1, 2, 3]]][dist.get_rank()] if inside else [])
    number = mw.shard_tensor(3.5, mesh, [Replicate()])
    assert number.shape == ()
    everywhere = mw.reshard(number, LINE, [Partial("sum")])
    assert everywhere.to_local().item() == (3.5 if dist.get_rank() == 0 else 0)
    assert mw.reshard(everywhere, mesh, [Replicate()]).shape == ()
    assert mw.reshard(mw.reshard(number, mesh, [Partial("max")]), LINE, [Replicate()]).to_local().item() == 3.5


@pytest.mark.quick
def test_lists_numbers_and_negative_dims(pool4):
    pool4.run(shard_many_kinds)


def move_dtype(dtype: torch.dtype, placements: Sequence[Any]) -> bool:
    whole = torch.arange(35).view(7, 5) % 2 if dtype == torch.bool else torch.arange(35).view(7, 5)
    whole = whole.to(dtype)
    first = mw.shard_tensor(whole, LINE, [placements[0]])
    same, other = mw.reshard(first, LINE, [placements[1]]), mw.reshard(first, SQUARE, [placements[1], Shard(1)])
    back = [mw.reshard(moved, ProcessMesh([2, 3]), [Replicate()]) for moved in (same, other)]
    if dist.get_rank() < 2:
        return all(tensor.to_local().numel() == 0 for tensor in back)
    return all(tensor.dtype == dtype and torch.equal(tensor.to_local(), whole) for tensor in back)


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.bfloat16, torch.float16, torch.complex64]


@pytest.mark.parametrize("dtype", crossings([*DTYPES, torch.uint16], but=[torch.bfloat16, torch.uint16]), ids=str)
def test_every_dtype_moves_bit_by_bit(pool4, dtype):
    assert all(pool4.run(move_dtype, dtype, [Shard(0), Shard(1)]))
    assert all(pool4.run(move_dtype, dtype, [Shard(1), Replicate()]))
    if dtype not in (torch.int16, torch.uint16):
        assert all(pool4.run(move_dtype, dtype, [Partial("sum"), Replicate()]))


def differentiate() -> None:
    rank, half = dist.get_rank(), ProcessMesh([2, 3])
    dense = torch.arange(35.0, dtype=torch.float64).view(7, 5).requires_grad_()
    weight = torch.arange(35.0, 70.0, dtype=torch.float64).view(7, 5)

    # One tensor placed on two meshes and used three times; the full gradient on every rank.
    x = mw.shard_tensor(dense * 2, LINE, [Shard(0)])
    y = mw.reshard(x, half, [Shard(1)])
    z = mw.reshard(x, half, [Partial("sum")])
    w = mw.shard_tensor(weight, half, [Shard(1)])
    loss = (y * w).sum() + z.sum() + mw.reshard((x * x).sum(), half, [Replicate()])
    loss.backward()
    assert torch.equal(dense.grad, 2 * (weight + 1 + 2 * (2 * dense.detach())))
    total = mw.reshard(loss, LINE, [Replicate()]).to_local().item()
    value = 2 * dense.detach()
    assert total == (value * weight).sum() + value.sum() + (value * value).sum()

    # Twice through a mesh crossing.
    leaf = mw.shard_tensor(nn.Parameter(weight), half, [Replicate()])
    cube = mw.reshard(leaf, LINE, [Shard(0)]) ** 3
    (first,) = torch.autograd.grad(cube.sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    if rank in half:
        assert torch.equal(mw.reshard(second, half, [Replicate()]).to_local(), 6 * weight)
    else:
        assert mw.reshard(second, half, [Replicate()]).to_local().numel() == 0

    with torch.no_grad():
        assert not mw.reshard(x, half, [Shard(0)]).requires_grad
    assert not mw.reshard(x.detach(), half, [Shard(0)]).requires_grad
    assert not mw.shard_tensor(weight, half, [Shard(0)]).requires_grad


def test_gradients_through_several_uses_and_twice(pool4):
    pool4.run(differentiate)


def move_what_outsiders_misjudge() -> list[list[int]]:
    mesh = ProcessMesh([0, 1])
    rank, shape = dist.get_rank(), torch.Size([4])
    local = torch.arange(4)[2 * rank : 2 * rank + 2]
    guess = Shard(0) if rank in mesh else Partial("max")
    x = DTensor.from_local(local, mesh.to_device_mesh("cpu"), [guess], shape=shape, stride=(1,))
    return [mw.reshard(x, to, [Replicate()]).to_local().tolist() for to in (ProcessMesh([1, 2]), mesh)]


def test_placements_are_those_of_the_ranks_in_the_mesh(pool4):
    # torch may settle on other placements for the result of an operator on a rank outside its mesh.
    whole = [0, 1, 2, 3]
    assert pool4.run(move_what_outsiders_misjudge) == [[[], whole], [whole, whole], [whole, []], [[], []]]


def make_parameters() -> None:
    full = nn.Parameter(torch.ones(4, 6))
    module = nn.Module()
    module.weight = mw.shard_tensor(full, ProcessMesh([0, 1, 2]), [Shard(0)])
    assert dict(module.named_parameters()).keys() == {"weight"}
    assert isinstance(module.weight, nn.Parameter) and module.weight.is_leaf and module.weight.requires_grad
    module.weight.sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert full.grad is None and bool((full == 1).all())
    assert module.weight.to_local().shape == ((2, 6), (2, 6), (0, 6), (0,))[dist.get_rank()]
    assert bool((module.weight.to_local() == 0).all())
    frozen = mw.shard_tensor(nn.Parameter(torch.ones(4), requires_grad=False), LINE, [Replicate()])
    assert isinstance(frozen, nn.Parameter) and not frozen.requires_grad


def test_a_parameter_stays_a_parameter(pool4):
    pool4.run(make_parameters)


def use_device_meshes() -> None:
    device_mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    x = mw.shard_tensor(torch.arange(8.0).view(4, 2), device_mesh, [Shard(0), Replicate()])
    assert x.device_mesh is device_mesh
    # The same ranks under other names: torch's operators want the very mesh that was asked for.
    renamed = mw.reshard(x, ProcessMesh([[0, 1], [2, 3]], ["a", "b"]), [Replicate(), Replicate()])
    assert renamed.device_mesh.mesh_dim_names == ("a", "b")
    assert torch.equal(renamed.to_local(), torch.arange(8.0).view(4, 2))
    groups = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        mw.reshard(x, ProcessMesh([[0, 1], [2, 3]], ["a", "b"]), [Shard(1), Shard(0)])
    assert len(dist.distributed_c10d._world.pg_map) == groups


def test_device_meshes_are_meshes_and_groups_are_made_once(pool4):
    pool4.run(use_device_meshes)


def failures_of(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """The message of each call's ValueError; ranks stay in step, or the next call would hang."""
    messages = {}
    for name, call in calls.items():
        with pytest.raises(ValueError) as caught:
            call()
        messages[name] = str(caught.value)
    mw.shard_tensor(torch.ones(4), LINE, [Shard(0)])
    return messages


def call_wrongly() -> dict[str, str]:
    rank = dist.get_rank()
    data = torch.ones(4, 6)
    placed_data = mw.shard_tensor(data, LINE, [Shard(0)])
    sorted_by_torch = DeviceMesh("cpu", [1, 0, 2, 3])
    whole, stride = torch.Size((7, 6)), (6, 1)
    device_mesh = LINE.to_device_mesh("cpu")
    uneven = DTensor.from_local(torch.ones(1 + rank, 6), device_mesh, [Shard(0)], shape=whole, stride=stride)
    half_partial = DTensor.from_local(data, device_mesh, [Replicate() if rank else Partial()])
    either = DTensor.from_local(torch.ones(6, 6), device_mesh, [Shard(0) if rank else Shard(1)])

    def shard(*placements: Any, mesh: Any = LINE, data: Any = data) -> Callable[[], Any]:
        return lambda: mw.shard_tensor(data, mesh, list(placements))

    return failures_of(
        {
            "no placement": shard(),
            "two placements": shard(Shard(0), Shard(1)),
            "not a list": lambda: mw.shard_tensor(data, LINE, Shard(0)),
            "a string": shard("shard"),
            "dim beyond": shard(Shard(2)),
            "dim far below": shard(Shard(-3)),
            "dim of a scalar": shard(Shard(0), data=1.0),
            "product": shard(Partial("product")),
            "avg of ints": shard(Partial("avg"), data=[1, 2]),
            "max of complex": shard(Partial("max"), data=torch.ones(2, dtype=torch.complex64)),
            "sum of int16": shard(Partial(), data=torch.ones(2, dtype=torch.int16)),
            "mixed": shard(Partial("sum"), Partial("max"), mesh=SQUARE),
            "unknown rank": shard(Shard(0), mesh=ProcessMesh([0, 4])),
            "no mesh": shard(Shard(0), mesh=[0, 1]),
            "sorted": shard(Shard(0), mesh=sorted_by_torch),
            "twice": shard(Shard(1), data=placed_data),
            "plain": lambda: mw.reshard(data, LINE, [Shard(0)]),
            "ragged": shard(Shard(0), data=[[1, 2], [3]]),
            "text": shard(Shard(0), data="text"),
            "reshard beyond": lambda: mw.reshard(placed_data, LINE, [Shard(2)]),
            "reshard count": lambda: mw.reshard(placed_data, SQUARE, [Shard(0)]),
            "uneven parts": lambda: mw.reshard(uneven, LINE, [Replicate()]),
            "either": lambda: mw.reshard(either, SQUARE, [Replicate(), Replicate()]),
            "half partial": lambda: mw.reshard(half_partial, SQUARE, [Replicate(), Replicate()]),
            "shapes": shard(Shard(0), data=torch.ones(4, 7 if rank == 2 else 6)),
            "dtypes": shard(Shard(0), data=data.double() if rank in (1, 3) else data),
            "values": shard(Shard(0), data=data + (rank == 2)),
            "values beside": lambda: (data + (rank == 2)) @ mw.shard_tensor(torch.ones(6, 4), LINE, [Shard(0)]),
            "dims": shard(Shard(1 if rank == 0 else 0)),
            "meshes": shard(Shard(0), mesh=ProcessMesh([0, 1] if rank < 2 else [2, 3])),
            "one beyond": shard(Shard(2 if rank == 1 else 0)),
            "one records": shard(Shard(0), data=data.clone().requires_grad_(rank == 0)),
            "two calls": shard(Shard(0)) if rank else lambda: mw.reshard(placed_data, LINE, [Shard(0)]),
        }
    )


EXPECTED = {
    "no placement": "0 placements [] for the 1 axes ('d0',)",
    "two placements": "give one per axis",
    "not a list": "one placement per mesh axis",
    "a string": "a placement must be Shard(dim), Replicate() or Partial(op), got 'shard'",
    "dim beyond": "Shard(2) of a tensor with 2 dims; use a dim from -2 to 1",
    "dim far below": "Shard(-3) of a tensor with 2 dims",
    "dim of a scalar": "0 dims; use Replicate() or Partial()",
    "product": "the reductions are sum, avg, max, min",
    "avg of ints": "Partial('avg') of torch.int64",
    "max of complex": "complex numbers have no order",
    "sum of int16": "backends do not reduce it",
    "mixed": "Partial max and sum in one tensor",
    "unknown rank": "rank 4 is outside the world of 4 ranks",
    "no mesh": "the mesh must be a ProcessMesh or a DeviceMesh, got list",
    "sorted": "(1, 0, 2, 3) of axis 'd0' into (0, 1, 2, 3)",
    "twice": "move it with reshard(data, mesh, placements)",
    "plain": "reshard takes a DTensor, got Tensor",
    "ragged": "expected sequence of length 2 at dim 1",
    "text": "the data must be a tensor, an array, nested lists or a number",
    "reshard beyond": "Shard(2) of a tensor with 2 dims",
    "reshard count": "1 placements",
    "uneven parts": "local tensor has shape (1, 6), but [S(0)] of (7, 6) puts (2, 6) on rank 0",
    "either": "shape: (6, 24) on rank 0; (24, 6) on ranks 1, 2, 3",
    "half partial": "from placements: [P(sum)] on rank 0; [R] on ranks 1, 2, 3",
    "shapes": "shape: (4, 6) on ranks 0, 1, 3; (4, 7) on rank 2",
    "dtypes": "dtype: torch.float32 on ranks 0, 2; torch.float64 on ranks 1, 3",
    "values": "values in shard_tensor: digest",
    "values beside": "values in matmul, of a plain tensor beside a DTensor: digest",
    "dims": "placements: [S(1)] on rank 0; [S(0)] on ranks 1, 2, 3",
    "meshes": "mesh: ProcessMesh([0, 1], dim_names=('d0',)) on ranks 0, 1; ProcessMesh([2, 3]",
    "one beyond": "Shard(2) of a tensor with 2 dims; use a dim from -2 to 1 on rank 1",
    "one records": "records gradients: True on rank 0; False on ranks 1, 2, 3",
    "two calls": "call: reshard on rank 0; shard_tensor on ranks 1, 2, 3",
}


@pytest.mark.quick
def test_bad_input_fails_on_every_rank_alike(pool4):
    for rank, messages in enumerate(pool4.run(call_wrongly)):
        assert messages.keys() == EXPECTED.keys()
        for name, expected in EXPECTED.items():
            assert expected in messages[name], (rank, name, messages[name])
