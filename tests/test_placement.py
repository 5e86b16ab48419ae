"""shard_tensor and reshard against one process: every pair of placements, on and across meshes, exactly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright import Partial, ProcessMesh, Replicate, Shard
from support.placements import Case, joined, lacking, placements_of, reduced, shard_of

LINE = ProcessMesh([0, 1, 2, 3])
SQUARE = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
SHAPES = [(8, 4), (7, 5), (3, 1), (2, 0)]  # even; uneven; shorter than an axis of 4; nothing at all

# Source and target: disjoint, overlapping, another shape, smaller, larger, in another order.
CROSSINGS = [
    (ProcessMesh([0, 1]), ProcessMesh([2, 3])),
    (ProcessMesh([0, 1, 2]), ProcessMesh([1, 2, 3])),
    (LINE, SQUARE),
    (SQUARE, LINE),
    (ProcessMesh([2]), LINE),
    (LINE, ProcessMesh([1, 3])),
    (LINE, ProcessMesh([3, 1, 0, 2])),
    (ProcessMesh([2, 0]), ProcessMesh([1, 3, 2])),
    (ProcessMesh([[3, 1], [0, 2]]), ProcessMesh([[1], [2]])),
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


def source_tensor(case: Case) -> DTensor:
    """A tensor whose partial axes are truly spread: no rank has the value alone."""
    rank, mesh = dist.get_rank(), case.source.to_device_mesh("cpu")
    parts = case.parts()
    local = torch.empty(0, dtype=torch.float64)
    if rank in case.source:
        local = shard_of(parts[case.source.coordinate(rank)], case.source, case.from_placements, rank).contiguous()
    stride = torch.empty(case.shape).stride()
    local.requires_grad_()
    return DTensor.from_local(local, mesh, case.from_placements, shape=torch.Size(case.shape), stride=stride)


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
            seed = mw.shard_tensor(case.gradient(), case.target, gradient_placements(case.to_placements))
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


@pytest.mark.parametrize("mesh", [LINE, ProcessMesh([3, 1, 0, 2])], ids=repr)
def test_every_pair_on_one_axis(pool4, mesh):
    table = cases(mesh, mesh)
    check(table, pool4.run(move_all, table))


@pytest.mark.parametrize("shape", [(8, 4), (7, 5), (3, 1)], ids=str)
def test_every_pair_on_two_axes(pool4, shape):
    table = cases(SQUARE, SQUARE, [shape])
    check(table, pool4.run(move_all, table, timeout=240))


@pytest.mark.parametrize(("source", "target"), CROSSINGS, ids=repr)
def test_every_pair_across_meshes(pool4, source, target):
    shapes = SHAPES if source.ndim + target.ndim == 2 else [(7, 5), (3, 1)]
    table = cases(source, target, shapes)
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
