"""DataParallel against one process that sees all rows: gradients, buckets, overlap, unused parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from support.exact import relative_difference
from support.own_gradients import on_arrival
from support.replicas import (
    SMALL,
    Gradients,
    assert_all_equal,
    assert_equal,
    counted,
    gradients_of,
    loss_of,
    net,
    one_process,
    rows,
)

pytestmark = pytest.mark.quick


def backward_once(kind: str, **options: Any) -> Gradients:
    model = net(kind, seed=dist.get_rank())  # the first rank's weights count
    ddp = mw.DataParallel(model, **options)
    loss_of(ddp(rows(dist.get_rank()))).backward()
    return gradients_of(ddp)


KINDS = ["plain", "tied", "checkpoint", "reentrant", "reentrant shared", "dict", "dataclass"]


@pytest.mark.parametrize("find_unused_parameters", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_one_process(kind: str, find_unused_parameters: bool, pool2: Any) -> None:
    expected = one_process(kind)
    actual = pool2.run(backward_once, kind, find_unused_parameters=find_unused_parameters, **SMALL)
    assert_all_equal(actual, expected)
    # What would be wrong is caught: the ranks' own gradients differ from their mean.
    own = one_process(kind, ranks=1)
    scale, mean = own["scale"], expected["scale"]
    assert scale is not None and mean is not None and relative_difference(scale, mean) > 0.01


def test_four_ranks_in_default_buckets(pool4: Any) -> None:
    assert_all_equal(pool4.run(backward_once, "plain"), one_process("plain", ranks=4))


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_a_parameter_used_on_one_rank_only(find_unused_parameters: bool, pool2: Any) -> None:
    actual = pool2.run(backward_once, "only used on one rank", find_unused_parameters=find_unused_parameters, **SMALL)
    first, second = actual
    assert_equal(first, second)
    model = net()
    loss_of(model(rows(0))).backward()
    x = rows(1)
    hidden = model.first(x)
    for layer in model.layers:
        hidden = layer(hidden).tanh()
    loss_of(model.head(hidden) * model.scale + model.unused(hidden)).backward()
    assert_equal(first, {n: None if p.grad is None else p.grad / 2 for n, p in model.named_parameters()})


class Gate(nn.Module):
    """Rank 0 uses ``branch`` where its gradient is exactly zero, rank 1 does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.nobody = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return x + 0 * self.branch(x) if dist.get_rank() == 0 else x


def weights_after_decay() -> tuple[dict[str, Tensor], list[bool]]:
    ddp = mw.DataParallel(Gate())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1, weight_decay=0.5)
    for batch in range(2):
        ddp(rows(dist.get_rank(), batch).float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ddp(rows(0).float()).mean().backward()
    return dict(ddp.state_dict()), [p.grad is None for p in ddp.module.nobody.parameters()]


def test_a_zero_gradient_and_none_do_not_drive_the_ranks_apart(pool2: Any) -> None:
    (first, none), (second, _) = pool2.run(weights_after_decay)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert none == [True, True]


def accumulate(by_hand: bool, zeros: bool) -> tuple[Gradients, list[bool]]:
    ddp = mw.DataParallel(net(), **SMALL)
    loss_of(ddp(rows(dist.get_rank(), 7))).backward()
    ddp.zero_grad(set_to_none=not zeros)
    refused = []

    def clip() -> None:
        try:
            mw.clip_grad_norm_(ddp, 1e9)
            refused.append(False)
        except ValueError:
            refused.append(True)

    with ddp.no_sync():
        for batch in range(2):
            loss_of(ddp(rows(dist.get_rank(), batch))).backward()
    clip()
    with ddp.no_sync() if by_hand else contextlib.nullcontext():
        loss_of(ddp(rows(dist.get_rank(), 2))).backward()
    clip()
    if by_hand:
        mw.fused_allreduce_gradients(list(ddp.parameters()), None)
        clip()
    return gradients_of(ddp), refused


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_no_sync_then_a_pass_outside_or_by_hand(by_hand: bool, zeros: bool, pool2: Any) -> None:
    expected = one_process("plain", batches=3)
    for actual, refused in pool2.run(accumulate, by_hand, zeros):
        if zeros:  # gradients that were zeroed, not dropped, are zeros where one process has None
            actual = {name: None if expected[name] is None else grad for name, grad in actual.items()}
        assert_equal(actual, expected)
        assert refused == ([True, True, False] if by_hand else [True, False])


def unsynchronised() -> tuple[list[int], Tensor]:
    ddp = mw.DataParallel(net())
    with counted() as sizes, ddp.no_sync():
        loss_of(ddp(rows(dist.get_rank()))).backward()
    x = rows(dist.get_rank()).requires_grad_()
    with counted() as more:
        torch.autograd.grad(loss_of(ddp(x)), x)
    assert ddp.scale.grad is not None and not more
    return sizes, ddp.scale.grad


def test_no_sync_and_autograd_grad_send_nothing(pool2: Any) -> None:
    (sizes, first), (_, second) = pool2.run(unsynchronised)
    assert sizes == [] and first != second


def bucket_sizes(comm_mb: float, last_mb: float, half: tuple[int, ...] = ()) -> list[int]:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    for layer in half:
        model[layer].bfloat16()
    ddp = mw.DataParallel(model, comm_buffer_size=comm_mb, last_comm_buffer_size=last_mb)
    with counted() as sizes:
        sum(p.float().sum() for p in model.parameters()).backward()
    assert all(p.grad is not None for p in ddp.parameters())
    return sizes


KIB = 1 / 1024


@pytest.mark.parametrize(
    ("comm_mb", "last_mb", "layers"),
    [
        (25, 1, [8]),
        (3 * KIB, 1 * KIB, [3, 3, 1, 1]),
        (3 * KIB, 2 * KIB, [3, 3, 2]),
        (100 * KIB, 2.5 * KIB, [6, 2]),
        (0.5 * KIB, 0.25 * KIB, [1] * 8),  # a layer is larger than a bucket: one each
    ],
)
def test_bucket_sizes(comm_mb: float, last_mb: float, layers: list[int], pool2: Any) -> None:
    # A layer is 1 KiB: 256 elements, and one that tells whether there is a gradient.
    assert pool2.run(bucket_sizes, comm_mb, last_mb)[0] == [257 * count for count in layers]


def test_buckets_of_two_dtypes_are_ordered_by_their_last_gradient(pool2: Any) -> None:
    # Layers 7 and 1 are float32 and 1 KiB each, those between bfloat16 and half of that. Backward completes
    # {6, 5, 4, 3}, then {2}, then {7, 1}; {0} is the last bucket.
    sizes = pool2.run(bucket_sizes, 2 * KIB, 1 * KIB, half=(2, 3, 4, 5, 6))[0]
    assert sizes == [257 * 4, 257, 257 * 2, 257]


class Checkpointed(nn.Sequential):
    """Every parameter is inside of a reentrant checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def reductions() -> tuple[int, int]:
    model = Checkpointed(*(nn.Linear(4, 4) for _ in range(3)))
    ddp = mw.DataParallel(model, comm_buffer_size=80 / 2**20, last_comm_buffer_size=1 / 2**20)
    x = rows(dist.get_rank()).float().requires_grad_()
    with counted() as sizes:
        ddp(x).sum().backward()
    return len(sizes), sum(p.grad is not None for p in model.parameters())


def test_passes_nested_in_backward_do_not_synchronise_on_their_own(pool2: Any) -> None:
    # Three layers of a weight and a bias: a bucket each, but for the first layer, whose weight is the last bucket.
    assert pool2.run(reductions) == [(4, 6)] * 2


def started_before_the_end(model: nn.Module, **options: Any) -> tuple[int, int]:
    """How many buckets had started when the first layer's gradient came, and how many there are."""
    ddp = mw.DataParallel(model, **options, **SMALL)
    early: list[int] = []
    x = rows(dist.get_rank()).requires_grad_()
    with counted() as sizes:
        output = ddp(x)
        x.register_hook(lambda _: early.append(len(sizes)))
        loss_of(output).backward()
    return early[0], len(sizes)


def overlap(find_unused_parameters: bool) -> tuple[int, int]:
    return started_before_the_end(net(), find_unused_parameters=find_unused_parameters)


def test_buckets_start_during_backward_and_unused_parameters_hold_them_up_only_unless_found(pool2: Any) -> None:
    # Net.unused comes last in the model, so it is in the first bucket.
    waited, count = pool2.run(overlap, False)[0]
    found, same = pool2.run(overlap, True)[0]
    assert count == same >= 5
    assert waited == 0 and found >= count - 2


def use_late(inside_a_checkpoint: bool) -> None:
    model = net()
    ddp = mw.DataParallel(model, find_unused_parameters=not inside_a_checkpoint, **SMALL)
    x = torch.ones(1, 6, dtype=torch.float64, requires_grad=True)
    if inside_a_checkpoint:
        aside = checkpoint(model.unused, x, use_reentrant=True) + model.unused(x.detach())
    else:
        aside = model.unused(x)
    # What is computed first has its backward last.
    (loss_of(ddp(rows(dist.get_rank()))) + aside.sum()).backward()


@pytest.mark.parametrize(
    ("inside_a_checkpoint", "advice"), [(False, "find_unused_parameters"), (True, "use_reentrant")]
)
def test_a_gradient_that_comes_too_late_is_an_error(inside_a_checkpoint: bool, advice: str, pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(use_late, inside_a_checkpoint):
        assert kind == "ValueError" and "unused" in message and advice in message


def several_passes() -> dict[str, Gradients]:
    """Backward passes that a plain loop never makes; the hooks of all of them see the same model."""
    results: dict[str, Gradients] = {}
    rank = dist.get_rank() if dist.is_initialized() else None
    ranks = (0, 1) if rank is None else (rank,)

    def run(name: str, step: Callable[[nn.Module, int], None]) -> None:
        model: nn.Module = net()
        if rank is not None:
            model = mw.DataParallel(model, **SMALL)
        for of_rank in ranks:
            step(model, of_rank)
        results[name] = gradients_of(model)

    def twice(model: nn.Module, rank: int) -> None:
        loss = loss_of(model(rows(rank))) / len(ranks)
        loss.backward(retain_graph=True)
        loss.backward()

    def two_forwards(model: nn.Module, rank: int) -> None:
        (loss_of(model(rows(rank))) * loss_of(model(rows(rank, 1))) / len(ranks)).backward()

    def penalty(model: nn.Module, rank: int) -> None:
        x = rows(rank).requires_grad_()
        loss = loss_of(model(x))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        ((loss + slope.square().sum()) / len(ranks)).backward()

    for step in (twice, two_forwards, penalty):
        run(step.__name__, step)
    return results


def test_several_passes_and_a_gradient_penalty(pool2: Any) -> None:
    expected = several_passes()
    for actual in pool2.run(several_passes):
        for name, of_one_process in expected.items():
            assert_equal(actual[name], of_one_process)


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return (self.left if left else self.right)(x)


def two_branches_before_one_backward(order: tuple[bool, bool]) -> list[bool]:
    ddp = mw.DataParallel(Either(), find_unused_parameters=True, **SMALL)
    x = rows(dist.get_rank()).float()
    sum(ddp(x, left).sum() for left in order).backward()
    mean = (rows(0) + rows(1)).float().sum(0).expand(4, 4) / 2
    # float32, and sums of ten numbers.
    return [torch.allclose(layer.weight.grad, mean, atol=1e-5) for layer in (ddp.left, ddp.right)]


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_what_one_forward_leaves_unused_another_may_use(order: tuple[bool, bool], pool2: Any) -> None:
    assert pool2.run(two_branches_before_one_backward, order) == [[True, True]] * 2


def pass_after_an_error() -> tuple[int, Gradients]:
    ddp = mw.DataParallel(net(), find_unused_parameters=True, **SMALL)
    planned = on_arrival(ddp.first.weight, _fail)
    with counted() as sizes, pytest.raises(RuntimeError, match="planned"):
        loss_of(ddp(rows(dist.get_rank()))).backward()
    planned.remove()
    ddp.zero_grad()
    loss_of(ddp(rows(dist.get_rank()))).backward()
    return len(sizes), gradients_of(ddp)


def _fail(grad: Tensor) -> Tensor:
    raise RuntimeError("planned")


def test_a_pass_that_raised_leaves_nothing_to_the_next(pool2: Any) -> None:
    for started, actual in pool2.run(pass_after_an_error):
        assert started > 1
        assert_equal(actual, one_process("plain"))
